"""The values of running functions, read without keeping them alive. Only here is f_locals read."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any


def is_function(frame: FrameType) -> bool:
    """True for the frame of a function; False for a module, a cell or the body of a class."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The values of a frame's names. Drop them as soon as they are read.

    Before Python 3.13, `f_locals` of a function is a dict that the frame keeps: what a loop deletes
    or replaces would live to the function's end. So it is emptied, unless others hold it, who have
    called `locals()`, or a debugger may write it back into the function.
    """
    if not is_function(frame):
        return frame.f_locals
    values = frame.f_locals
    found = dict(values)
    if sys.version_info < (3, 13):
        traced = frame.f_trace is not None or sys.gettrace() is not None
        # Three: of the frame, of `values`, and of the argument.
        if not traced and sys.getrefcount(values) == 3:
            values.clear()
    return found
