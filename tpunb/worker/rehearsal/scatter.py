"""Reduce-scatter in a rehearsal. Signatures are those of torch_xla (2.8, 2.9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpunb.worker.rehearsal import reductions
from tpunb.worker.rehearsal.gather import EMPTY, Token, dim_problem, first_is_empty, shards_problem
from tpunb.worker.rehearsal.peers import Groups, Peers, by_type, counted, describe
from tpunb.worker.rehearsal.values import on_device, overwrite, read


class ReduceScatter:
    """Every rank gets its share of the values of all, reduced."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def new(
        self,
        reduce_type: str,
        tensor: torch.Tensor,
        token: Token,
        scale: float,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> tuple[torch.Tensor, Token]:
        """`_XLAC._xla_reduce_scatter`: a leaf that requires grad as the input does, the token."""
        counted("ReduceScatter")
        (value,) = self.values(reduce_type, [tensor], scale, dim, shard_count, groups)
        return on_device(value, tensor, gradient=True), token

    def out(
        self,
        reduce_type: str,
        output: torch.Tensor,
        tensor: torch.Tensor,
        token: Token,
        scale: float,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
    ) -> Token:
        """`_XLAC._xla_reduce_scatter_out`."""
        counted("ReduceScatterOut")
        (value,) = self.values(reduce_type, [tensor], scale, dim, shard_count, groups)
        overwrite(output, value)
        return token

    def coalesced(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        token: Token,
        scale: float,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
    ) -> list[Any]:
        """`_XLAC._xla_reduce_scatter_coalesced`: the tensors, without grad, and the token."""
        values = self.values(reduce_type, tensors, scale, dim, shard_count, groups)
        pairs = zip(values, tensors, strict=True)
        return [*(on_device(value, tensor, gradient=False) for value, tensor in pairs), token]

    def coalesced_out(
        self,
        reduce_type: str,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        token: Token,
        scale: float,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
    ) -> Token:
        """`_XLAC._xla_reduce_scatter_coalesced_out`."""
        values = self.values(reduce_type, tensors, scale, dim, shard_count, groups)
        for output, value in zip(outputs, values, strict=True):
            overwrite(output, value)
        return token

    def values(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        scale: float,
        dim: int,
        shard_count: int,
        groups: Groups,
    ) -> list[torch.Tensor]:
        """This rank's shares on the CPU, one message for all tensors of one type.

        Each rank gets its share from all and reduces it: half the bytes of an all-reduce.
        """
        scaled = reductions.scale_text(scale)
        detail = f"dim {dim}, {scaled}" if scaled else f"dim {dim}"
        call = describe(f"reduce_scatter {reduce_type}", tensors, detail, groups)
        everyone, members = self._peers.members(call, groups)
        problem = (
            reductions.check(call, reduce_type, tensors)
            or shards_problem(shard_count, members)
            or _problem(tensors, dim, shard_count)
        )
        if problem:
            self._peers.refuse(call, everyone, problem)
        values = read(tensors)
        with self._peers.wire.together(call, everyone):
            for dtype, indexes in by_type(values).items():
                chunks = [values[index].chunk(shard_count, dim) for index in indexes]
                shapes = [mine[0].shape for mine in chunks]
                flat = torch.cat(
                    [chunk.reshape(-1) for one in zip(*chunks, strict=True) for chunk in one]
                )
                sizes = [flat.numel() * flat.itemsize // shard_count] * shard_count
                received = self._peers.wire.all_to_all(
                    flat.view(torch.uint8), sizes, sizes, members, call
                )
                parts = [part.view(dtype) for part in received.split(sizes)]
                share = reductions.scaled(reductions.reduced(reduce_type, parts), scale, dtype)
                counts = [shape.numel() for shape in shapes]
                for index, shape, part in zip(indexes, shapes, share.split(counts), strict=True):
                    values[index] = part.reshape(shape)
        return values


def _problem(tensors: Sequence[torch.Tensor], dim: int, shard_count: int) -> str:
    if not tensors:
        return "torch_xla crashes with an empty list here, also on a TPU"
    for tensor in tensors:
        if problem := dim_problem(tensor, dim, "scatter_dim"):
            return problem
        if tensor.shape[dim] % shard_count:
            return f"dimension {dim} of {list(tensor.shape)} has no {shard_count} equal shares"
    return EMPTY if first_is_empty(tensors) else ""
