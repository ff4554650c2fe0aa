"""The DeviceGuard of the rehearsed device, which torch asks for the type of the device.

torch asks from C++ that must not fail: if the answer raises, torch calls std::terminate and the
process ends (torch/csrc/acc/Module.cpp; checked with torch 2.11 to 2.15). Two things could let it
raise, so the answer executes no Python code:

- An error of a hook in a backward pass (the user's, or FSDP's, which waits for other ranks) is
  still set while torch unwinds, and with an error set each Python function fails. So the answer
  takes the error away, and `backward` raises it.
- Ctrl-C. Python runs a signal's handler where a function begins, and pybind11 runs it, too, after
  it has looked up the answer and before it calls it. So SIGINT's handler waits for the call.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

_fields = (ctypes.c_void_p * 3)()
"""Where PyErr_Fetch writes type, value and traceback."""
_content = (ctypes.c_char * ctypes.sizeof(_fields)).from_buffer(_fields)
_NO_ERROR: bytes = _content.raw
_taken: dict[bytes, Any] = {}
"""By what PyErr_Fetch wrote: each error, once, since it is not freed; and no error. The values are
the answer."""


def make_device_guard() -> Any:
    """The DeviceGuard of the rehearsed device."""
    accelerator: Any = torch._C._acc  # type: ignore[attr-defined]

    class Guard(accelerator.DeviceGuard):  # type: ignore[misc]
        type_ = staticmethod(_answer)  # of this class: a search in others would clear the error

    global _references
    _references = sys.getrefcount(_answer)
    return Guard()


def _make_answer() -> Callable[[], Any]:
    """What this function does, by iterators in C, of which each call takes the next item:

    PyErr_Fetch(*fields)
    return taken.setdefault(content.raw, kind)
    """
    # A function of its own, as all have one result type. Without argtypes: converters of arguments
    # would be calls that fail.
    fetch: Any = ctypes.PyDLL(None)["PyErr_Fetch"]
    fetch.restype = functools.partial(getattr, _content, "raw")  # ignores the integer it is given
    size = ctypes.sizeof(ctypes.c_void_p)
    pointers = (ctypes.c_void_p(ctypes.addressof(_fields) + index * size) for index in range(3))
    contents = map(fetch, *map(itertools.repeat, pointers))
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return functools.partial(next, map(_taken.setdefault, contents, itertools.repeat(kind)))


_answer = _make_answer()
_references = 0
"""To the answer, if torch is not asking: pybind11 has one from its look-up to its call."""


def _errors() -> Iterator[BaseException]:
    """Give back the errors that were taken."""
    restore: Any = ctypes.pythonapi.PyErr_Restore
    restore.restype = None
    for content in [each for each in _taken if each != _NO_ERROR]:
        del _taken[content]
        try:
            restore(*map(ctypes.c_void_p, (ctypes.c_void_p * 3).from_buffer_copy(content)))
        except BaseException as error:  # what was restored
            yield error


def raise_in_backward() -> None:
    """Have `backward` and `torch.autograd.grad` raise what the DeviceGuard has taken."""
    from torch.autograd import graph

    run: Any = graph._engine_run_backward

    def run_backward(*args: Any, **options: Any) -> Any:
        list(_errors())  # of no interest any longer
        try:
            return run(*args, **options)
        except SystemError:  # "error return without exception set"
            error = next(_errors(), None)
            if error is None:
                raise
        raise error

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]


def defer_interrupts() -> None:
    """Have SIGINT's handler wait while torch asks. To be called again after others have set one.

    Other signals' handlers may raise as well; they do not wait.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and not isinstance(handler, _Deferring):
        signal.signal(signal.SIGINT, _Deferring(handler))


class _Deferring:
    """Calls a signal's handler at once, or before the next line of Python if torch is asking."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if frame is None or sys.getrefcount(_answer) <= _references:
            self._handler(number, frame)
            return
        others = sys.gettrace(), frame.f_trace

        def trace(entered: FrameType, event: str, value: object) -> None:
            before, frame.f_trace = others
            sys.settrace(before)
            self._handler(number, frame)

        frame.f_trace = trace
        sys.settrace(trace)
