"""torch.compile(backend="openxla") around collectives.

torch_xla's bridge from dynamo traces a graph once and keeps the compiled program: a collective
inside would run while tracing, and its result would be a constant of the program. So a graph
with collectives is run by torch_xla's lazy tensors, whose programs end at each collective. All
other graphs are compiled as usual.

The bridge can also cut a graph at operations that XLA does not support, and compile the pieces.
This was tried and rejected: a piece that only passes tensors on (the copy_ behind an in-place
all-reduce) gave zeros on the first call or an IndexError (torch_xla 2.9), unlike the whole graph on
a TPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule
from torch_xla._dynamo import dynamo_bridge as bridge

from tpunb.backends.xla.rehearsal.cross_replica import is_operator
from tpunb.backends.xla.rehearsal.launches import launches

_compile: Callable[..., Any] = bridge.extract_compiled_graph_helper


def patch_dynamo_bridge() -> None:
    """Make torch_xla's bridge leave graphs with collectives to lazy tensors."""
    bridge.extract_compiled_graph_helper = _extract


def _extract(xla_model: GraphModule, xla_args: Any) -> Any:
    """`extract_compiled_graph_helper`: returns a function that runs the graph."""
    if any(is_operator(node.target) for node in xla_model.graph.nodes):
        return _own_program(xla_model)
    return _compile(xla_model, xla_args)


def _own_program(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a graph that on a TPU is a program of its own, which every call runs."""

    def run(*args: Any) -> Any:
        before = launches.number
        result = graph(*args)
        launches.forget_results(before)
        return result

    return run
