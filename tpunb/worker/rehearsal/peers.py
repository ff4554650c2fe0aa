"""The ranks of a run, as a collective of one of them sees them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch_xla

from tpunb.worker.rehearsal.calls import Call
from tpunb.worker.rehearsal.gloo import Wire
from tpunb.worker.rehearsal.layouts import Layouts

Groups = Sequence[Sequence[int]]

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]


class Peers:
    """All ranks, and the wire between them."""

    def __init__(self, wire: Wire, world_size: int) -> None:
        self.wire = wire
        self.world = tuple(range(world_size))
        self.layouts = Layouts(wire.rank)

    def members(self, call: Call, groups: Groups) -> tuple[Sequence[int], Sequence[int]]:
        """The ranks that take part in the call, and those of this rank's group.

        All groups take part: a TPU's cores start a program together. Raises ValueError for
        groups that XLA's compiler refuses (its check of replica groups), and where this rank
        is in none.
        """
        if not groups:
            return self.world, self.world
        named = [rank for group in groups for rank in group]
        if sorted(named) != list(range(len(named))) or not all(groups):
            raise ValueError(
                f"{call}: XLA takes only groups that name each rank from 0 on, once, and are "
                "not empty. With torch.distributed, `dist.new_group(ranks, "
                "pg_options={'xla_pg_options': {'spmd': True}})` names the others as well"
            )
        for group in groups:
            if self.wire.rank in group:
                return sorted(named), tuple(group)
        raise ValueError(f"{call}: rank {self.wire.rank} is in none of the groups")

    def refuse(self, call: Call, everyone: Sequence[int], problem: str) -> NoReturn:
        """Raise ValueError on all ranks that made this call.

        It is a MismatchError if they made different ones: then the reason may be on another.
        """
        with self.wire.together(call, everyone):
            pass
        raise ValueError(f"{call}: {problem}")


def describe(
    operation: str, tensors: Sequence[torch.Tensor], detail: str = "", groups: Groups = ()
) -> Call:
    """The call, as the ranks compare it.

    Raises RuntimeError for a CPU tensor, as torch_xla does on a TPU.
    """
    for tensor in tensors:
        if not tensor.is_xla:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"Expected XLA tensor. Got: {tensor.type()}. torch_xla's collectives take tensors "
                "of the device only, and so does a torch.distributed group 'xla' or "
                "'cpu:gloo,xla:xla', which also sends objects as CPU tensors. For these make a "
                "group beside it, `cpu = dist.new_group(backend='gloo')`, and pass group=cpu"
            )
    if groups:
        named = f"groups {[list(group) for group in groups]}"
        detail = f"{detail}, {named}" if detail else named
    return _call(operation, tuple((tensor.dtype, tensor.shape) for tensor in tensors), detail)


@functools.lru_cache(maxsize=512)
def _call(operation: str, kinds: Sequence[tuple[torch.dtype, torch.Size]], detail: str) -> Call:
    """Kept: a training step makes the same calls, of as many tensors as the model has, again."""
    named = (f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in kinds)
    return Call(operation, tuple(named), detail)


def by_type(values: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """The indexes of the values of each type: they travel in one message."""
    together: dict[torch.dtype, list[int]] = {}
    for index, value in enumerate(values):
        together.setdefault(value.dtype, []).append(index)
    return together


def counted(name: str) -> None:
    """Add one to the counter that torch_xla's own function counts in (debug.metrics)."""
    _XLAC._xla_increment_counter(f"xla::{name}", 1)
