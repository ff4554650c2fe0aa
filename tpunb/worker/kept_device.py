"""Keeps a rehearsal on the CPU: notebooks for a TPU set PJRT_DEVICE in their cells.

torch_xla reads the variable when its runtime starts, which may be in the cell that has set it, so
it is kept where it is set. What child processes inherit is kept with it.
"""

from __future__ import annotations

import os
import sys

NAME = "PJRT_DEVICE"
_DEVICE = "CPU"
_told = False


class _KeepingDevice(os._Environ[str]):
    """`os.environ`, in which one variable has one value. It may be removed, as it could before."""

    def __setitem__(self, name: str, value: str) -> None:
        if name == NAME and value != _DEVICE:
            _tell(f"{NAME}={value}")
            value = _DEVICE
        super().__setitem__(name, value)


def keep_cpu() -> None:
    """For the rest of this process and its forks, `os.environ` keeps PJRT_DEVICE=CPU."""
    os.environ[NAME] = _DEVICE
    os.environ.__class__ = _KeepingDevice


def _tell(what: str) -> None:
    """Once, and of several ranks one does it."""
    global _told
    if not _told and os.environ.get("RANK", "0") == "0":
        print(f"{what} is ignored: this run is a rehearsal on CPU", file=sys.stderr, flush=True)
    _told = True
