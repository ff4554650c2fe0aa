"""The kernel's own XLA device: the CPU, unless the person asks for the TPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.models import Device

_chosen = False
_taken_in: int | None = None
"""The cell in which the kernel's own XLA runtime was started; 0: one that is not known."""
_ENVIRON = Path("/proc/self/environ")
"""What this process was started with."""


def is_persons(executed: Iterable[str]) -> bool:
    """Whether the kernel's PJRT_DEVICE is the person's choice. `executed`: the cells that ran.

    Otherwise it is tpunb's, or that of torch_xla, whose import always sets it: to TPU where it
    finds one (2.9, runtime.py).
    """
    if "PJRT_DEVICE" not in os.environ or _chosen:
        return False
    if "torch_xla" not in sys.modules or b"PJRT_DEVICE=" in _ENVIRON.read_bytes():
        return True
    return any("PJRT_DEVICE" in text or "set_device_type" in text for text in executed)


def watch(shell: InteractiveShell) -> None:
    """Notice in which cell the kernel takes its XLA device."""
    global _taken_in
    if _runtime_runs():
        _taken_in = 0
    shell.events.register("post_run_cell", _note_cell)


def unwatch(shell: InteractiveShell) -> None:
    """Notice it no more."""
    shell.events.unregister("post_run_cell", _note_cell)


def _note_cell(result: Any) -> None:
    global _taken_in
    if _taken_in is None and result is not None and _runtime_runs():
        _taken_in = result.execution_count or 0


def taken_in() -> int | None:
    """The number of the cell in which the kernel has taken its XLA device; None if it has not,
    or did before tpunb was loaded.
    """
    return _taken_in or None


def _runtime_runs() -> bool:
    xla = sys.modules.get("torch_xla")
    return xla is not None and bool(xla._XLAC._xla_runtime_is_initialized())


def kernel_device(wanted: Device | None = None, *, persons: bool = False) -> str | None:
    """Choose the kernel's own XLA device: without `wanted` as chosen before, or the CPU.

    Chips are exclusive: a kernel that holds the TPU blocks every run, so it is the CPU unless
    the person asks for the TPU. `persons`: that PJRT_DEVICE is the person's choice, which stays.
    Returns what to tell the person; None if nothing has changed that could.
    """
    global _chosen
    now = os.environ.get("PJRT_DEVICE")
    if (now == wanted) if wanted is not None else (persons or _chosen):
        return None
    if persons:
        return f"the kernel's own XLA device stays the {now}, as PJRT_DEVICE says in this notebook"
    if _runtime_runs():
        if wanted is None:
            return None
        since = f" since cell [{_taken_in}]" if _taken_in else ""
        return (
            f"the kernel's own XLA device stays the {now}: it is in use{since}. "
            f"Restart the kernel, then ask for the {wanted} first"
        )
    wanted = wanted or "CPU"
    os.environ["PJRT_DEVICE"] = wanted
    _chosen = True
    return (
        None
        if now == wanted
        else (f"the kernel's own XLA device is the {wanted} (PJRT_DEVICE={wanted})")
    )
