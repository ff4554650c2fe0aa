"""torch.compile(backend="openxla") around collectives.

torch_xla's bridge from dynamo traces a graph once and keeps the compiled program: a collective
inside would run while tracing, and its result would be a constant of the program. So a graph
with collectives is run by torch_xla's lazy tensors, whose programs end at each collective. All
other graphs are compiled as ever.

The bridge can also cut a graph at what XLA cannot do, and compile the pieces. Tried, and not
used: a piece that only passes tensors on (the copy_ behind an in-place all-reduce) gave zeros
on the first call or an IndexError (torch_xla 2.9), which the whole graph does not on a TPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from torch_xla._dynamo import dynamo_bridge as bridge

from tpunb.worker.xla_patches import OPS

_Function = TypeVar("_Function", bound=Callable[..., Any])

_compile: Callable[..., Any] = bridge.extract_compiled_graph_helper


def install() -> None:
    """Make torch_xla's bridge leave graphs with collectives to lazy tensors."""
    bridge.extract_compiled_graph_helper = _extract


def left_to_dynamo(function: _Function) -> _Function:
    """`function`, into which dynamo does not look, as it cannot look into torch_xla's own."""
    disabled: _Function = torch.compiler.disable(function)
    return disabled


def _extract(xla_model: GraphModule, xla_args: Any) -> Any:
    """`extract_compiled_graph_helper`: what runs the graph. Before it runs, nobody communicates."""
    if any(_communicates(node.target) for node in xla_model.graph.nodes):
        return xla_model
    return _compile(xla_model, xla_args)


def _communicates(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == OPS
