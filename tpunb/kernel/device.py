"""The kernel's own device: the CPU, unless the user asks for the TPU."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from tpunb.backends.torchtpu import loading
from tpunb.backends.torchtpu.loading import AUTOLOAD
from tpunb.backends.xla import runtime
from tpunb.machine import machine, tpu
from tpunb.runs.spec import Device
from tpunb.utils.errors import SetupError
from tpunb.utils.patching import Replacements

_chosen = False
"""True if `choose_device` has set PJRT_DEVICE."""
_cell_that_took_it: int | None = None
"""Number of the cell that started the kernel's own XLA runtime; 0 if the cell is unknown."""
_ENVIRON = Path("/proc/self/environ")
"""The environment with which this process was started."""
_autoload_off = False
"""True if `rehearse_tpu` has set AUTOLOAD."""
_at_import: Replacements | None = None
"""What installs the rehearsed device when torch is imported."""
_REHEARSED = "tpunb.backends.torchtpu.rehearsal.rehearsed_device"
_GUARD = "tpunb.backends.torchtpu.rehearsal.device_guard"


def rehearse_tpu() -> None:
    """Give the kernel a rehearsed `torch.device("tpu")`, at once or when torch is imported.

    Prints why it cannot have one.
    """
    global _autoload_off, _at_import
    if loading.is_loaded():
        _print(
            "torch_tpu was loaded before tpunb, so the kernel has no rehearsed TPU. Runs have one: "
            "their ranks are processes of their own. For the kernel, too: restart it, and run "
            "`%load_ext tpunb` before torch is imported"
        )
    elif "torch" in sys.modules:
        _install(sys.modules["torch"])
    else:
        if os.environ.get(AUTOLOAD, "1") == "1":
            os.environ[AUTOLOAD], _autoload_off = "0", True
        loading.put_stand_in()
        _at_import = Replacements({"torch": _install})
        _at_import.begin()


def _install(torch: ModuleType) -> None:
    """An error must not be one of `import torch`."""
    try:
        importlib.import_module(_REHEARSED).install()
    except SetupError as error:
        _print(str(error))


def _print(problem: str) -> None:
    print(f"tpunb: {problem}", file=sys.stderr)


def leave_tpu_alone() -> None:
    """Undo `rehearse_tpu`, unless torch has been imported since."""
    global _autoload_off, _at_import
    if _at_import is None or "torch" in sys.modules:
        return
    _at_import.end()
    loading.remove_stand_in()
    if _autoload_off:
        del os.environ[AUTOLOAD]
    _autoload_off, _at_import = False, None


def defer_interrupts(info: object) -> None:
    """Before a cell, for which Jupyter sets a handler of SIGINT: have it wait for torch's C++."""
    if (guard := sys.modules.get(_GUARD)) is not None:
        guard.defer_interrupts()


def variables_set_here() -> tuple[str, ...]:
    """Return the names of variables that are only for the kernel's own device."""
    return (AUTOLOAD,) if _autoload_off else ()


def user_set_pjrt_device(executed: Iterable[str]) -> bool:
    """True if the user chose PJRT_DEVICE (in the environment, or in one of the executed cells).

    False if tpunb set it, or torch_xla, whose import always sets it: to TPU if it finds one
    (2.9, runtime.py).
    """
    if "PJRT_DEVICE" not in os.environ or _chosen:
        return False
    if "torch_xla" not in sys.modules or _in_first_environment():
        return True
    return any("PJRT_DEVICE" in text or "set_device_type" in text for text in executed)


def _in_first_environment() -> bool:
    return b"PJRT_DEVICE=" in _ENVIRON.read_bytes()


def cell_asks_for_missing_tpu() -> bool:
    """True if a cell has set PJRT_DEVICE=TPU on a machine without a TPU, as notebooks for TPUs do.

    Runs are rehearsals then, unless the kernel was started with this variable.
    """
    return (
        os.environ.get("PJRT_DEVICE") == "TPU"
        and not _in_first_environment()
        and not tpu.count_chips(machine.root_of(os.environ))[0]
    )


def note_running() -> None:
    """Note whether the kernel has its XLA device before tpunb is loaded."""
    global _cell_that_took_it
    if runtime.is_running():
        _cell_that_took_it = 0


def note_cell(result: Any) -> None:
    """After a cell: note whether the kernel has taken its XLA device in it."""
    global _cell_that_took_it
    if _cell_that_took_it is None and result is not None and runtime.is_running():
        _cell_that_took_it = result.execution_count or 0


def cell_that_took_device() -> int | None:
    """Return the number of the cell in which the kernel took its XLA device; None if it has not,
    or took it before tpunb was loaded.
    """
    return _cell_that_took_it or None


def choose_device(wanted: Device | None = None, *, set_by_user: bool = False) -> str | None:
    """Choose the kernel's own XLA device: `wanted`, by default the earlier choice or the CPU.

    A chip belongs to one process: a kernel that holds the TPU blocks every run, so the default is
    the CPU. `set_by_user`: PJRT_DEVICE is the user's choice and stays. Returns a message if the
    device has changed, or could not be changed as wanted; otherwise None.
    """
    global _chosen
    now = os.environ.get("PJRT_DEVICE")
    if (now == wanted) if wanted is not None else (set_by_user or _chosen):
        return None
    if set_by_user:
        return f"the kernel still uses XLA on {now}, because this notebook sets PJRT_DEVICE={now}"
    if runtime.is_running():
        if wanted is None:
            return None
        since = f" since cell [{_cell_that_took_it}]" if _cell_that_took_it else ""
        return (
            f"the kernel still uses XLA on {now}: it is in use{since}. "
            f"Restart the kernel, and choose the {wanted} before any other cell uses XLA"
        )
    wanted = wanted or "CPU"
    os.environ["PJRT_DEVICE"] = wanted
    _chosen = True
    if now == wanted:
        return None
    if wanted == "CPU":
        return "the kernel uses XLA on CPU, so that runs can take a TPU (PJRT_DEVICE=CPU)"
    return "the kernel uses XLA on TPU (PJRT_DEVICE=TPU)"
