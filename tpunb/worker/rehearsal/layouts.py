"""Whether the all-reduces of one step agree on `pin_layout`: XLA refuses a program in which not.

torch_xla ties the all-reduces between two torch_xla.sync() to each other by a token, so that they
are in one program ("HloModule has a mix of layout constrained and unconstrained AllReduce
instructions": seen with one replica, torch_xla 2.8 and 2.9, also with .item() between them).
"""

from __future__ import annotations

from typing import Any

import torch_xla

from tpunb.worker.rehearsal import divergence
from tpunb.worker.rehearsal.calls import Call, users_line

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_set_token: Any = _XLAC._set_all_reduce_token


class Layouts:
    """Of the all-reduces of one rank since its last torch_xla.sync()."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._first: tuple[bool, str] | None = None
        self._told = False

    def add(self, call: Call, pinned: bool | None) -> None:
        """One more; says once, on rank 0, if it does not fit the first of the step.

        None for one in a program of its own: torch.compile's.
        """
        if self._told or self._rank > 0 or pinned is None:
            return
        if self._first is None:
            self._first = pinned, f"{call} at {users_line()}"
            return
        before, place = self._first
        if before != pinned:
            self._told = True
            divergence.say(
                f"{call} at {users_line()} has pin_layout={pinned}, and in the same step "
                f"pin_layout={before} has {place}. This works here, and on a TPU XLA refuses the "
                "program ('HloModule has a mix of layout constrained and unconstrained AllReduce "
                "instructions'). The functions of xm pin by default, those of torch.distributed "
                "do not: pass pin_layout=False to the former, or call torch_xla.sync() between "
                "them."
            )

    def set_token(self, device: str, token: Any) -> None:
        """`_XLAC._set_all_reduce_token`: torch_xla.sync() sets none, and a program ends."""
        if token is None:
            self._first = None
            divergence.mine.end()
        _set_token(device, token)
