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

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from torch_xla._dynamo import dynamo_bridge as bridge

from tpunb.backends.xla.private_names import OPS
from tpunb.backends.xla.rehearsal.collectives import AllGather, AllReduce, AllToAll, ReduceScatter
from tpunb.backends.xla.rehearsal.launches import launches
from tpunb.backends.xla.rehearsal.peers import increment_counter
from tpunb.backends.xla.rehearsal.tensors import on_device

_Function = TypeVar("_Function", bound=Callable[..., Any])

_compile: Callable[..., Any] = bridge.extract_compiled_graph_helper


def patch_dynamo_bridge() -> None:
    """Make torch_xla's bridge leave graphs with collectives to lazy tensors."""
    bridge.extract_compiled_graph_helper = _extract


def opaque_to_dynamo(function: _Function) -> _Function:
    """Wrap a function so that dynamo does not trace it, as it does not trace torch_xla's own."""
    disabled: _Function = torch.compiler.disable(function)
    return disabled


def _extract(xla_model: GraphModule, xla_args: Any) -> Any:
    """`extract_compiled_graph_helper`: returns a function that runs the graph."""
    if any(_is_collective(node.target) for node in xla_model.graph.nodes):
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


def _is_collective(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == OPS


def functional_operators(
    world_size: int,
    all_reduce: AllReduce,
    all_gather: AllGather,
    reduce_scatter: ReduceScatter,
    all_to_all: AllToAll,
) -> dict[str, Callable[..., Any]]:
    """XLA kernels of torch.ops._c10d_functional, which torch.compile can trace, by operator name.

    torch's dispatcher adds autograd. torch_xla's own kernels ignore groups too, and use all ranks.
    """

    def reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        increment_counter("all_reduce")
        # xm.all_reduce names no group; torch.distributed's all_reduce under dynamo does.
        pinned = None if group_name else True
        (value,) = all_reduce.values(reduce_op, [tensor], pin_layout=pinned)
        return on_device(value, tensor, gradient=False)

    def gather(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
        increment_counter("all_gather_into_tensor")
        (value,) = all_gather.values([tensor], 0, group_size, [range(group_size)])
        return on_device(value, tensor, gradient=False)

    def scatter(
        tensor: torch.Tensor, reduce_op: str, group_size: int, group_name: str
    ) -> torch.Tensor:
        increment_counter("reduce_scatter_tensor")
        (value,) = reduce_scatter.values(
            reduce_op, [tensor], 1.0, 0, group_size, [range(group_size)]
        )
        return on_device(value, tensor, gradient=False)

    def shuffle(
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        group_name: str,
    ) -> torch.Tensor:
        increment_counter("all_to_all_single")
        if len({*output_split_sizes, *input_split_sizes}) > 1:
            raise RuntimeError("torch_xla does not support arbitrary split sizes for all_to_all")
        value = all_to_all.values(tensor, 0, 0, world_size)
        return on_device(value, tensor, gradient=False)

    return {
        "all_reduce": reduce,
        "all_gather_into_tensor": gather,
        "reduce_scatter_tensor": scatter,
        "all_to_all_single": shuffle,
    }
