"""Errors of hooks in a backward pass, which end the process with torch's DeviceGuard for Python.

A hook of a tensor (the user's, or FSDP's, which waits for other ranks) that raises leaves Python's
error set while torch unwinds. On its way it asks the DeviceGuard for the type of the device, and
calls this Python method from C++ that must not fail: with an error set each call fails, and torch
calls std::terminate (seen with torch 2.13; torch/csrc/acc/Module.cpp). So this one takes the error
away, and `backward` raises it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

# Without argtypes: a converter of arguments would be a call that fails.
_take: Any = ctypes.pythonapi.PyErr_Fetch
_take.restype = None
_restore: Any = ctypes.pythonapi.PyErr_Restore
_restore.restype = None
_taken = (ctypes.c_void_p * 3)()
"""Type, value and traceback. Only the thread that has the GIL uses it."""
_kind, _value, _traceback = (
    ctypes.c_void_p(ctypes.addressof(_taken) + index * ctypes.sizeof(ctypes.c_void_p))
    for index in range(3)
)
_errors: list[BaseException] = []
"""Taken in the backward pass that runs."""


def make_device_guard() -> Any:
    """The DeviceGuard of the rehearsed device."""
    accelerator: Any = torch._C._acc  # type: ignore[attr-defined]
    kind = torch._C._autograd.DeviceType.PrivateUse1

    class Guard(accelerator.DeviceGuard):  # type: ignore[misc]
        def type_(self) -> Any:
            _take(_kind, _value, _traceback)  # before any other call, which would fail
            if _taken[0]:
                _keep()
            return kind

    return Guard()


def _keep() -> None:
    try:
        _restore(*(ctypes.c_void_p(part) for part in _taken))  # ctypes raises it then
    except BaseException as error:
        _errors.append(error)


def raise_in_backward() -> None:
    """Have `backward` and `torch.autograd.grad` raise what the DeviceGuard has taken."""
    from torch.autograd import graph

    run: Any = graph._engine_run_backward

    def run_backward(*args: Any, **options: Any) -> Any:
        _errors.clear()
        try:
            return run(*args, **options)
        except SystemError:  # "error return without exception set"
            if not _errors:
                raise
        raise _errors[0]

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
