"""A run whose one process drives all cores, in torch_xla's SPMD mode: whether, and in what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpunb import spmd
from tpunb.platforms import environment
from tpunb.platforms.environment import Change
from tpunb.platforms.machine import Machine

DEVICES = "CPU_NUM_DEVICES"
"""How many devices a process has on CPU: read by torch_xla when its runtime starts."""


@dataclass(frozen=True)
class OneProcess:
    """How such a run is started."""

    why: str
    """What shows that it is one: 'cell [3] calls use_spmd()'."""
    cores: int
    """How many the process drives."""
    changes: tuple[Change, ...]
    """What its environment must have, or must not have, beside the kernel's."""
    env: Mapping[str, str]
    """Its environment."""


def look(
    kernel: Mapping[str, str],
    asked: Mapping[str, str],
    here: Machine,
    cores: int,
    cells: str | None,
) -> OneProcess | None:
    """How a run is started that is one of SPMD; None for one with a process for each core.

    `kernel` is the kernel's environment, `asked` what `--env` gives, which decides where it
    names XLA_USE_SPMD; `cells`: what the run's cells show.
    """
    why = _why(kernel, asked, cells)
    if why is None:
        return None
    if here.device == "TPU" and here.devices_per_chip > 1:
        cores = here.chips * here.devices_per_chip  # --cores counts ranks, of which it has one
    found = {change.name: change for change in environment.changes(kernel, here.device, here)}
    if here.device == "CPU":
        found[DEVICES] = Change(DEVICES, str(cores), "SPMD: the cores that one process drives")
    elif cores > 1:
        # Kaggle sets them for what a notebook there is: one process with all chips.
        for name in ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"):
            found.pop(name, None)
    if why == cells:  # those cells shall find it off, as they did in the kernel
        found[spmd.VARIABLE] = Change(spmd.VARIABLE, None, "the cells of the run set it themselves")
    changes = [change for change in found.values() if kernel.get(change.name) != change.value]
    values = {**kernel, **{change.name: change.value for change in changes}, **asked}
    env = {name: value for name, value in values.items() if value is not None}
    return OneProcess(why, cores, tuple(changes), env)


def _why(kernel: Mapping[str, str], asked: Mapping[str, str], cells: str | None) -> str | None:
    if spmd.VARIABLE in asked:
        on = spmd.is_on(asked)
        return f"--env {spmd.VARIABLE}={asked[spmd.VARIABLE]}" if on else None
    if cells is None and spmd.is_on(kernel):
        return f"{spmd.VARIABLE} is set in the kernel's environment"
    return cells


def refused(asked: Mapping[str, str], here: Machine) -> str | None:
    """Why variables of `--env` cannot be had; None if they can."""
    if here.device == "CPU" and asked.get(DEVICES, "1") != "1":
        return (
            f"{DEVICES}={asked[DEVICES]}: a rank of a rehearsal has one device, and the process of "
            "a notebook that uses SPMD as many as --cores says. Several devices in a rank, which "
            "torch_xla drives from threads as on a TPU v2 or v3, are not rehearsed"
        )
    return None
