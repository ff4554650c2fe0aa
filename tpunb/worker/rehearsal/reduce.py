"""All-reduce in a rehearsal. Signatures are those of torch_xla (2.8, 2.9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tpunb.worker.rehearsal import reductions
from tpunb.worker.rehearsal.calls import Call
from tpunb.worker.rehearsal.peers import Groups, Peers, by_type, counted, describe
from tpunb.worker.rehearsal.values import on_device, overwrite, read


class AllReduce:
    """Every rank gets the same: the values of all, reduced."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def new(
        self,
        reduce_type: str,
        tensor: torch.Tensor,
        scale: float,
        groups: Groups,
        pin_layout: bool,
    ) -> torch.Tensor:
        """`_XLAC._xla_all_reduce`: a new tensor, a leaf that requires grad as the input does."""
        counted("AllReduce")
        (value,) = self.values(reduce_type, [tensor], scale, groups, pin_layout)
        return on_device(value, tensor, gradient=True)

    def in_place(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        scale: float,
        groups: Groups,
        pin_layout: bool,
    ) -> None:
        """`_XLAC._xla_all_reduce_inplace`."""
        counted("AllReduceInPlace")
        values = self.values(reduce_type, tensors, scale, groups, pin_layout)
        for tensor, value in zip(tensors, values, strict=True):
            overwrite(tensor, value)

    def values(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        scale: float = 1.0,
        groups: Groups = (),
        pin_layout: bool | None = None,
    ) -> list[torch.Tensor]:
        """The reduced values on the CPU, one message for all tensors of one type."""
        scaled = reductions.scale_text(scale)
        call = describe(f"all_reduce {reduce_type}", tensors, scaled, groups)
        everyone, members = self._peers.members(call, groups)
        if problem := reductions.check(call, reduce_type, tensors):
            self._peers.refuse(call, everyone, problem)
        self._peers.layouts.add(call, pin_layout)
        values = read(tensors)
        with self._peers.wire.together(call, everyone):
            for indexes in by_type(values).values():
                flat = torch.cat([values[index].reshape(-1) for index in indexes])
                flat = self._reduced(reduce_type, flat, members, call)
                flat = reductions.scaled(flat, scale, values[indexes[0]].dtype)
                sizes = [values[index].numel() for index in indexes]
                for index, part in zip(indexes, flat.split(sizes), strict=True):
                    values[index] = part.reshape(values[index].shape)
        return values

    def _reduced(
        self, reduce_type: str, flat: torch.Tensor, members: Sequence[int], call: Call
    ) -> torch.Tensor:
        if reduce_type == "sum" and flat.dtype != torch.bool:
            flat = flat.to(reductions.wire_type(flat.dtype))
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            self._peers.wire.all_reduce(real, dist.ReduceOp.SUM, members, call)
            return flat
        parts = self._peers.wire.all_gather(flat.view(torch.uint8), members, call)
        return reductions.reduced(reduce_type, [part.view(flat.dtype) for part in parts])
