"""All-reduce in a rehearsal. Signatures are those of torch_xla (2.8, 2.9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpunb.worker.rehearsal import reductions
from tpunb.worker.rehearsal.calls import Call
from tpunb.worker.rehearsal.peers import Groups, Peers, by_type, counted, describe
from tpunb.worker.rehearsal.transfer import flatten
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
        overwrite(tensors, values)

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
        messages = [
            _Message.of(reduce_type, values, indexes) for indexes in by_type(values).values()
        ]
        brought = messages[0].flat if len(messages) == 1 else None
        with self._peers.wire.together(call, everyone, brought=brought):
            reduced = [self._reduced(reduce_type, each, members, call) for each in messages]
        for message, flat in zip(messages, reduced, strict=True):
            flat = reductions.scaled(flat, scale, message.dtype)
            parts = flat.split_with_sizes(message.sizes)[::2]
            for index, part in zip(message.indexes, parts, strict=True):
                shape = values[index].shape
                values[index] = part if len(shape) == 1 else part.view(shape)
        return values

    def _reduced(
        self, reduce_type: str, message: _Message, members: Sequence[int], call: Call
    ) -> torch.Tensor:
        if message.is_sum:
            self._peers.wire.all_reduce(message.flat, members, call)
            return message.flat.view(reductions.wire_type(message.dtype))
        parts = self._peers.wire.all_gather(message.flat, members, call)
        return reductions.reduced(reduce_type, [part.view(message.dtype) for part in parts])


@dataclass(frozen=True)
class _Message:
    """Values of one type, which travel together."""

    indexes: list[int]
    dtype: torch.dtype
    is_sum: bool
    """Whether gloo may reduce it: not bool, and what gloo knows no NaN of."""
    flat: torch.Tensor
    """Numbers that can be added, else bytes."""
    sizes: list[int]
    """Of each value and of what is behind it, in elements of its own type."""

    @classmethod
    def of(cls, reduce_type: str, values: Sequence[torch.Tensor], indexes: list[int]) -> _Message:
        dtype = values[indexes[0]].dtype
        is_sum = reduce_type == "sum" and dtype != torch.bool
        wire_type = reductions.wire_type(dtype) if is_sum else dtype
        flat, sizes = flatten([values[index] for index in indexes], wire_type)
        if not is_sum:
            flat = flat.view(torch.uint8)
        elif flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        return cls(indexes, dtype, is_sum, flat, sizes)
