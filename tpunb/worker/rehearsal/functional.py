"""torch.ops._c10d_functional on XLA in a rehearsal: what torch.compile can trace.

torch_xla's own kernels know no groups either: they are for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpunb.worker.rehearsal.gather import AllGather
from tpunb.worker.rehearsal.peers import counted
from tpunb.worker.rehearsal.permute import Exchange
from tpunb.worker.rehearsal.reduce import AllReduce
from tpunb.worker.rehearsal.scatter import ReduceScatter
from tpunb.worker.rehearsal.values import on_device


def operators(
    all_reduce: AllReduce, all_gather: AllGather, scatter: ReduceScatter, exchange: Exchange
) -> dict[str, Callable[..., Any]]:
    """Kernels by the names of their operators. torch's dispatcher adds what autograd needs."""

    def reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        counted("all_reduce")
        # xm.all_reduce names no group, torch.distributed's that dynamo has traced does.
        pinned = None if group_name else True
        (value,) = all_reduce.values(reduce_op, [tensor], pin_layout=pinned)
        return on_device(value, tensor, gradient=False)

    def gather(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
        counted("all_gather_into_tensor")
        (value,) = all_gather.values([tensor], 0, group_size, [range(group_size)])
        return on_device(value, tensor, gradient=False)

    def reduce_scatter(
        tensor: torch.Tensor, reduce_op: str, group_size: int, group_name: str
    ) -> torch.Tensor:
        counted("reduce_scatter_tensor")
        (value,) = scatter.values(reduce_op, [tensor], 1.0, 0, group_size, [range(group_size)])
        return on_device(value, tensor, gradient=False)

    def all_to_all(
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        group_name: str,
    ) -> torch.Tensor:
        counted("all_to_all_single")
        if len({*output_split_sizes, *input_split_sizes}) > 1:
            raise RuntimeError("torch_xla does not support arbitrary split sizes for all_to_all")
        value = exchange.values(tensor, 0, 0, len(exchange.peers.world))
        return on_device(value, tensor, gradient=False)

    return {
        "all_reduce": reduce,
        "all_gather_into_tensor": gather,
        "reduce_scatter_tensor": reduce_scatter,
        "all_to_all_single": all_to_all,
    }
