"""The ranks of a rehearsal, their groups, and the description of a collective call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch_xla

from tpunb.backends.rehearsal.call import RankCall
from tpunb.backends.rehearsal.wire import Wire
from tpunb.backends.xla.rehearsal.divergence import PinLayoutCheck

Groups = Sequence[Sequence[int]]

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]


class Peers:
    """All ranks of the run, and the wire between them."""

    def __init__(self, wire: Wire, world_size: int) -> None:
        self.wire = wire
        self.world = tuple(range(world_size))
        self.pin_layouts = PinLayoutCheck(wire.rank)

    def members(self, call: RankCall, groups: Groups) -> tuple[Sequence[int], Sequence[int]]:
        """The ranks that take part in the call, and the ranks of this rank's group.

        All groups take part, because a TPU's cores start a program together. Raises ValueError
        for groups that XLA's compiler refuses: "replica groups should contain 4 replicas, but
        found 2".
        """
        if not groups:
            return self.world, self.world
        named = [rank for group in groups for rank in group]
        if sorted(named) != list(self.world) or not all(groups):
            raise ValueError(
                f"{call}: XLA accepts only non-empty groups that name each of the "
                f"{len(self.world)} ranks once, and every rank must make the call. With "
                "torch.distributed, `dist.new_group(ranks, pg_options={'xla_pg_options': {'spmd': "
                "True}})` names the other ranks as well"
            )
        for group in groups:
            if self.wire.rank in group:
                return self.world, tuple(group)
        raise AssertionError("each rank is in a group")

    def refuse(self, call: RankCall, everyone: Sequence[int], problem: str) -> NoReturn:
        """Raise ValueError on all ranks that made this call.

        Raises MismatchError instead if the ranks made different calls: the cause may then be on
        another rank.
        """
        with self.wire.exchange(call, everyone):
            pass
        raise ValueError(f"{call}: {problem}")


def describe_call(
    operation: str, tensors: Sequence[torch.Tensor], detail: str = "", groups: Groups = ()
) -> RankCall:
    """Describe the call for the comparison between ranks.

    Raises RuntimeError for a CPU tensor, as torch_xla does on a TPU.
    """
    for tensor in tensors:
        if not tensor.is_xla:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"Expected XLA tensor. Got: {tensor.type()}. torch_xla's collectives accept only "
                "tensors on the device, and so do torch.distributed's groups 'xla' and "
                "'cpu:gloo,xla:xla', which also send objects as CPU tensors. For CPU tensors and "
                "objects make a second group, `cpu = dist.new_group(backend='gloo')`, and pass "
                "group=cpu"
            )
    if groups:
        named = f"groups {[list(group) for group in groups]}"
        detail = f"{detail}, {named}" if detail else named
    return _call(operation, tuple((tensor.dtype, tensor.shape) for tensor in tensors), detail)


@functools.lru_cache(maxsize=512)
def _call(operation: str, kinds: Sequence[tuple[torch.dtype, torch.Size]], detail: str) -> RankCall:
    """Build a call. Cached: each step repeats its calls, with as many tensors as the model has."""
    named = (f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in kinds)
    return RankCall(operation, tuple(named), detail)


def group_by_type(values: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """The indexes of the values of each dtype, which are sent in one message."""
    indexes: dict[torch.dtype, list[int]] = {}
    for index, value in enumerate(values):
        indexes.setdefault(value.dtype, []).append(index)
    return indexes


def increment_counter(name: str) -> None:
    """Add one to the counter of the replaced torch_xla function (torch_xla.debug.metrics)."""
    _XLAC._xla_increment_counter(f"xla::{name}", 1)
