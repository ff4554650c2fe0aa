"""torch_xla's SPMD mode in the processes of a run: what is prepared, checked and refused.

One process drives all cores then. Private names, checked on torch_xla 2.8 and 2.9, are listed in
`xla_patches`: `xr.use_spmd` calls `_xla_get_spmd_config_is_locked` first of all, and
`_xla_force_spmd_device` if a device was in use before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from tpunb import spmd
from tpunb.errors import SetupError, TpunbError
from tpunb.models import RunSpec

INSTEAD = (
    "That is how a run is started unless reading its cells shows SPMD: write `xr.use_spmd()` "
    "where it surely runs, at the top of a cell, or give "
    f"`%%tpu_train --env {spmd.VARIABLE}=1`"
)


def _xlac() -> Any:
    """torch_xla's own module, which is imported where anything here is called.

    Not imported here: %%tpu_debug imports this.
    """
    return sys.modules["torch_xla"]._XLAC


class SpmdError(TpunbError, RuntimeError):
    """SPMD was asked for in a process that cannot have it, or too late."""


def prepare() -> None:
    """In a process that may use SPMD on CPU devices, before the user's code.

    Switching it on after a device was used ends a process with CPU devices, be it one or several,
    by SIGSEGV (measured on torch_xla 2.9): here it raises.
    """
    _xlac()._xla_force_spmd_device = _too_late


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """A block, in the notebook's kernel, in which the same holds."""
    before = _xlac()._xla_force_spmd_device
    prepare()
    try:
        yield
    finally:
        _xlac()._xla_force_spmd_device = before


def _too_late() -> NoReturn:
    raise SpmdError(
        "xr.use_spmd() comes after an XLA device was used (torch_xla.device(), a tensor on 'xla'). "
        "On CPU devices torch_xla crashes then, and on a TPU what was made before is copied to all "
        "cores. Call it first, right after the imports (in a kernel: restart it)"
    )


def refuse_in_ranks() -> None:
    """In one of several rehearsal ranks, before the user's code: a rank has one device."""
    for name in ("_xla_get_spmd_config_is_locked", "_xla_force_spmd_device", "_xla_mark_sharding"):
        setattr(_xlac(), name, _one_of_many)
    devices, count = _xlac()._xla_get_devices, _xlac()._xla_num_devices

    def get_devices() -> list[str]:
        found: list[str] = devices()
        _one_device(len(found))
        return found

    def num_devices() -> int:
        found: int = count()
        _one_device(found)
        return found

    _xlac()._xla_get_devices, _xlac()._xla_num_devices = get_devices, num_devices


def _one_of_many(*args: object) -> NoReturn:
    ranks = os.environ.get("WORLD_SIZE", "several")
    raise SpmdError(
        f"SPMD needs one process that drives all cores, and this is one of {ranks} processes with "
        f"a core each. {INSTEAD}"
    )


def check_prelude(spec: RunSpec, cell: int | None) -> None:
    """After a cell of a prelude that is run for several ranks: has it switched SPMD on?

    Raises SpmdError if it has: each rank would go on in a mode of its own.
    """
    if spec.world_size > 1 and spmd.is_on(os.environ):
        raise SpmdError(
            f"cell [{cell}] has switched SPMD on, in which one process drives all cores, and this "
            f"run has {spec.world_size} processes with a core each. {INSTEAD}"
        )


def check_devices() -> None:
    """In one of several ranks on a TPU, once the runtime has started: a rank has one device."""
    _one_device(_xlac()._xla_num_devices())


def _one_device(count: int) -> None:
    """Raise SetupError where torch_xla would run a thread for each of several devices, as on a
    TPU v2 or v3 (pjrt._run_thread_per_device).
    """
    if count > 1:
        raise SetupError(
            f"this process has {count} XLA devices, and a rank has one: torch_xla would run "
            f"{count} threads in it, as on a TPU v2 or v3, and here all but the first device would "
            "be missed in every collective. On a TPU v2 or v3 use one core (--cores 1), or SPMD "
            "(xr.use_spmd()), where one process drives all; in a rehearsal leave CPU_NUM_DEVICES "
            "alone"
        )


def unused() -> str:
    """What to say at the end of an SPMD run in which it was never switched on; '' if it was."""
    if spmd.is_on(os.environ):
        return ""
    return (
        "SPMD was never switched on in this run, so that it used one core of all: call "
        f"xr.use_spmd(), or give %%tpu_train --env {spmd.VARIABLE}=0 for a process on each core"
    )
