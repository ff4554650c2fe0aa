"""The environment of a run whose one process drives all cores (torch_xla's SPMD mode)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpunb import spmd
from tpunb.models import Device
from tpunb.platforms.environment import Change

DEVICES = "CPU_NUM_DEVICES"
"""How many devices a process has on CPU: read by torch_xla when its runtime starts."""


def changes(
    kernel: Mapping[str, str],
    device: Device,
    cores: int,
    ranks: Sequence[Change],
    *,
    by_cells: bool,
) -> list[Change]:
    """What it must have, or must not have, beside the kernel's environment.

    `ranks` are the changes for a run with a process for each core. `by_cells`: the run's cells
    switch SPMD on, and shall find it off, as they did in the kernel.
    """
    found = {change.name: change for change in ranks}
    if device == "CPU":
        found[DEVICES] = Change(DEVICES, str(cores), "SPMD: the cores that one process drives")
    elif cores > 1:
        # Kaggle sets them for what a notebook is there: one process with all chips.
        for name in ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"):
            found.pop(name, None)
    if by_cells:
        found[spmd.VARIABLE] = Change(spmd.VARIABLE, None, "the cells of the run set it themselves")
    return [change for change in found.values() if kernel.get(change.name) != change.value]


def reason(kernel: Mapping[str, str], asked: Mapping[str, str], cells: str | None) -> str | None:
    """Why a run is one of SPMD, in words; None if it has a process for each core.

    `asked` are the variables of --env, which decide; `cells` is what the cells show.
    """
    if spmd.VARIABLE in asked:
        on = spmd.is_on(asked)
        return f"--env {spmd.VARIABLE}={asked[spmd.VARIABLE]}" if on else None
    if cells is None and spmd.is_on(kernel):
        return f"{spmd.VARIABLE} is set in the kernel's environment"
    return cells


def environ(kernel: Mapping[str, str], made: Sequence[Change]) -> dict[str, str]:
    """A new dict: the kernel's environment with changes."""
    values = {**kernel, **{change.name: change.value for change in made}}
    return {name: value for name, value in values.items() if value is not None}
