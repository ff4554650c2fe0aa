"""Keeps a rehearsal on the CPU, although notebooks for a TPU set PJRT_DEVICE in their cells.

torch_xla reads the variable when its runtime starts, which may be in the same cell, so its value is
corrected when it is set. Child processes inherit the corrected value.
"""

from __future__ import annotations

import os
import sys

NAME = "PJRT_DEVICE"
_DEVICE = "CPU"
_reported = False


class _KeepingDevice(os._Environ[str]):
    """`os.environ`, with a fixed value for one variable, which may still be removed."""

    def __setitem__(self, name: str, value: str) -> None:
        if name == NAME and value != _DEVICE:
            _report(f"{NAME}={value}")
            value = _DEVICE
        super().__setitem__(name, value)


def keep_cpu() -> None:
    """Keep PJRT_DEVICE=CPU in `os.environ`, for the rest of this process and its forks."""
    os.environ[NAME] = _DEVICE
    os.environ.__class__ = _KeepingDevice


def _report(setting: str) -> None:
    """Print that a setting is ignored: once, and only on rank 0."""
    global _reported
    if not _reported and os.environ.get("RANK", "0") == "0":
        print(f"{setting} is ignored: this run is a rehearsal on CPU", file=sys.stderr, flush=True)
    _reported = True
