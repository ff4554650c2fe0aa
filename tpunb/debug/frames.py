"""Whose code runs now: lines of the notebook, of libraries, of torch, and of tpunb's helpers."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from types import CodeType, FrameType

from tpunb.debug import xla
from tpunb.debug.place import Place

Line = tuple[CodeType, int]

_OURS = "tpunb.debug."
_HELPERS = "tpunb."
_METHODS = (_OURS, "torch._tensor", "torch.overrides")
"""What stands between torch's function mode and the code that asks for a tensor's value."""


def place(files: Container[str]) -> Place | None:
    """The innermost line of the notebook that runs. `files`: the names of its cells."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in files:
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def reads_on_purpose() -> bool:
    """Whether a value is read where that is meant: in a step closure, or by a helper of tpunb's.

    (predict fetches outputs, save copies the state.) What such a helper calls is not its own.
    """
    asks = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == xla.CLOSURES:
            return True
        name = frame.f_globals.get("__name__", "")
        if not asks and not name.startswith(_METHODS):
            asks = name
        frame = frame.f_back
    return asks.startswith(_HELPERS)


def lines(files: Container[str]) -> list[Line]:
    """What runs now, from the notebook's outermost line inwards, without torch's own frames.

    Libraries' lines are among them: the loop may be in one of their functions.
    """
    found: list[Line] = []
    ours = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("torch", "torch_xla") and not name.startswith(_OURS):
            found.append((frame.f_code, frame.f_lineno))
        if frame.f_code.co_filename in files:
            ours = len(found)
        frame = frame.f_back
    return found[:ours][::-1]


def step_ended(files: Container[str]) -> list[Line]:
    """The lines that run when a step ends; none if a loader ends it.

    Below them the body of the loop still belongs to the step that has ended; a loader ends it
    when it is asked for the next batch.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in files:
        if frame.f_code.co_name == "__next__":
            return []
        frame = frame.f_back
    return lines(files)


def next_began(now: Sequence[Line], ended: Sequence[Line]) -> bool:
    """Whether the next step runs: a line above those at which the last one ended."""
    for (code, line), (same, last) in zip(now, ended, strict=False):
        if code is not same or line < last:
            return True
        if line > last:
            return False
    return False
