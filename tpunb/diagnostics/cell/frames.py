"""Lines of the notebook on the call stack, and the points where the steps of its loop end.

Does not import torch: `%load_ext tpunb` imports this module and must feel instant.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from tpunb.backends.xla import private_names


class SourceLine(NamedTuple):
    """A line of the notebook."""

    file: str
    """The name under which IPython compiled the cell."""
    line: int


class StepsDone(BaseException):
    """Raised when the number of steps of `--steps N` has run."""


Line = tuple[CodeType, int]

_OURS = "tpunb.diagnostics.cell."
_HELPERS = "tpunb."
_METHODS = (
    *(_OURS, "torch._tensor", "torch.overrides"),
    *("torch._dynamo", "torch._compile", "torch.utils._contextlib"),
)
"""Modules between torch's modes and the code that reads a tensor's value."""
_OF_OPTIMIZERS = (_OURS, "torch.optim", "torch.utils", "torch.autograd")
"""Modules between a call of an optimizer's step and its hooks: wrappers, schedulers."""
_GRAPHS = ("torch._functorch._aot_autograd", "torch._dynamo.backends", "torch._inductor")
"""Modules that run compiled graphs."""


def innermost_line(files: Container[str]) -> SourceLine | None:
    """The innermost running line of the notebook. `files`: the names of its cells."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in files:
            return SourceLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def whereabouts(files: Container[str]) -> tuple[SourceLine | None, bool]:
    """The innermost running line of the notebook, and whether a compiled graph runs below it."""
    compiled = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in files:
            return SourceLine(frame.f_code.co_filename, frame.f_lineno), compiled
        compiled = compiled or frame.f_globals.get("__name__", "").startswith(_GRAPHS)
        frame = frame.f_back
    return None, compiled


def reader_name(files: Container[str]) -> str:
    """The method of a tensor that reads its value here; "" for those without a Python frame.

    Not for `__repr__`, below which torch has no modes.
    """
    name = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in files:
        if frame.f_globals.get("__name__", "") == "torch._tensor":
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def reads_on_purpose() -> bool:
    """True if a value is read by a step closure or directly by a helper of tpunb.

    (predict fetches outputs, save copies the state.) Reads in functions that such a helper calls do
    not count.
    """
    reader = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == private_names.STEP_CLOSURES:
            return True
        name = frame.f_globals.get("__name__", "")
        if not reader and not name.startswith(_METHODS):
            reader = name
        frame = frame.f_back
    return reader.startswith(_HELPERS)


def optimizer_called_by(files: Container[str]) -> bool:
    """True if a line of the notebook calls the optimizer's step directly, seen from its hooks.

    Other callers (xm.optimizer_step, tpunb, libraries) reduce the gradients first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OF_OPTIMIZERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in files


def running_lines(files: Container[str]) -> list[Line]:
    """The running lines, from the notebook's outermost inwards, without torch's own frames.

    Includes lines of libraries, because the loop may be in one of their functions.
    """
    stack: list[Line] = []
    notebook = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("torch", "torch_xla") and not name.startswith(_OURS):
            stack.append((frame.f_code, frame.f_lineno))
        if frame.f_code.co_filename in files:
            notebook = len(stack)
        frame = frame.f_back
    return stack[:notebook][::-1]


def step_ended(files: Container[str]) -> list[Line]:
    """The running lines when a step ends; [] if a loader ends it.

    The rest of the loop's body below them still belongs to the step that has ended. A loader ends
    the step when the next batch is requested.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in files:
        if frame.f_code.co_name == "__next__":
            return []
        frame = frame.f_back
    return running_lines(files)


def next_began(now: Sequence[Line], ended: Sequence[Line]) -> bool:
    """True if the next step has begun: a line above those at which the last step ended runs."""
    for (code, line), (same, last) in zip(now, ended, strict=False):
        if code is not same or line < last:
            return True
        if line > last:
            return False
    return False
