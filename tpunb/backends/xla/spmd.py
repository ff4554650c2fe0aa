"""Checks of torch_xla's SPMD mode, in which one process drives all cores: is it on, and allowed?

`xr.use_spmd` calls `_xla_get_spmd_config_is_locked` first of all, and `_xla_force_spmd_device` if a
device was in use before (see `private_names`). Importing this module does not import torch_xla.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from tpunb.runs.spec import RunSpec
from tpunb.utils.errors import SetupError, TpunbError

VARIABLE = "XLA_USE_SPMD"
"""Set by `xr.use_spmd()`, and read by torch_xla at its first use of a device (2.8, 2.9)."""
INSTEAD = (
    "A run starts in SPMD mode only if its cells use SPMD themselves; libraries and scripts that "
    "they execute (exec, runpy) do not count: begin the train cell with `import torch_xla.runtime "
    "as xr; xr.use_spmd()`"
)


def is_on(env: Mapping[str, str]) -> bool:
    """True if torch_xla would be in SPMD mode in this environment."""
    return parse_flag(env.get(VARIABLE, ""))


def parse_flag(value: str) -> bool:
    """True if torch_xla treats a variable's value as true (its `check_env_flag`)."""
    return value == "true" or (value.isdigit() and int(value) > 0)


def _xlac() -> Any:
    """The module torch_xla._XLAC. The functions below are called after the import of torch_xla."""
    return sys.modules["torch_xla"]._XLAC


class SpmdError(TpunbError, RuntimeError):
    """SPMD was switched on in a process that cannot use it, or too late."""


def prepare_spmd() -> None:
    """Make switching SPMD on too late raise SpmdError, in a process that may use CPU devices.

    If SPMD is switched on after a CPU device was used, the process crashes with SIGSEGV (measured
    on torch_xla 2.9). Call this before the user's code.
    """
    _xlac()._xla_force_spmd_device = _too_late


@contextlib.contextmanager
def spmd_prepared() -> Iterator[None]:
    """`prepare_spmd` for a block, in the notebook's kernel."""
    before = _xlac()._xla_force_spmd_device
    prepare_spmd()
    try:
        yield
    finally:
        _xlac()._xla_force_spmd_device = before


def _too_late() -> NoReturn:
    raise SpmdError(
        "xr.use_spmd() was called after an XLA device was used (torch_xla.device(), a tensor on "
        "'xla'). On CPU devices torch_xla would crash, and on a TPU it copies the existing tensors "
        "to all cores. Call it first, right after the imports (in a kernel: restart the kernel)"
    )


def refuse_in_ranks() -> None:
    """Make SPMD raise SpmdError in one of several rehearsal ranks, which has one device."""
    for name in ("_xla_get_spmd_config_is_locked", "_xla_force_spmd_device", "_xla_mark_sharding"):
        setattr(_xlac(), name, _raise_in_rank)
    devices, count = _xlac()._xla_get_devices, _xlac()._xla_num_devices

    def get_devices() -> list[str]:
        names: list[str] = devices()
        _check_one_device(len(names))
        return names

    def num_devices() -> int:
        number: int = count()
        _check_one_device(number)
        return number

    _xlac()._xla_get_devices, _xlac()._xla_num_devices = get_devices, num_devices


def _raise_in_rank(*args: object) -> NoReturn:
    ranks = os.environ.get("WORLD_SIZE", "several")
    raise SpmdError(
        f"SPMD needs one process that drives all cores, but this is one of {ranks} processes with "
        f"one core each. {INSTEAD}"
    )


def check_prelude(spec: RunSpec, cell: int | None) -> None:
    """Raise SpmdError if a prelude cell has switched SPMD on in a run with several ranks.

    Each rank would continue in a mode of its own.
    """
    if spec.world_size > 1 and is_on(os.environ):
        raise SpmdError(
            f"cell [{cell}] has switched SPMD on, in which one process drives all cores, but this "
            f"run has {spec.world_size} processes with one core each. {INSTEAD}"
        )


def check_devices() -> None:
    """Raise SetupError if one of several ranks on a TPU has more than one device."""
    _check_one_device(_xlac()._xla_num_devices())


def _check_one_device(count: int) -> None:
    """torch_xla runs a thread per device, as on a TPU v2 or v3 (pjrt._run_thread_per_device)."""
    if count > 1:
        raise SetupError(
            f"this process has {count} XLA devices, but a rank has one. torch_xla would run "
            f"{count} threads in it, as on a TPU v2 or v3, and all devices but the first would be "
            "missing from every collective. On a TPU v2 or v3 use one core (--cores 1), or SPMD "
            "(xr.use_spmd()), in which one process drives all cores. In a rehearsal do not set "
            "CPU_NUM_DEVICES"
        )


def unused_warning() -> str:
    """The warning at the end of an SPMD run that never switched SPMD on; '' if it did."""
    if is_on(os.environ):
        return ""
    return (
        "SPMD was never switched on in this run, so it used only one core: call xr.use_spmd(), "
        f"or give %%tpu_train --env {VARIABLE}=0 for one process per core"
    )
