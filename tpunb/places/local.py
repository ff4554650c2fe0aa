"""`LocalTarget`: this machine, as a target like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpunb.machine import environment, prices
from tpunb.machine.environment import EnvChange
from tpunb.machine.machine import Machine
from tpunb.places.target import Target
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Device, Price
from tpunb.utils.errors import TpunbError


@dataclass(frozen=True)
class LocalTarget(Target):
    """This machine, on which the kernel starts runs itself."""

    here: Machine
    kernel: Mapping[str, str] = field(default_factory=dict)
    """The kernel's environment."""
    cores: int | None = None
    """The number of cores of runs without `--cores`; None: the machine's default."""
    remarks: tuple[str, ...] = ()
    """Notes for the user before the run."""

    @property
    def device(self) -> Device:
        return self.here.device

    @property
    def local_cores(self) -> int:
        return self.here.default_cores

    @property
    def price(self) -> Price | None:
        return prices.price_of(self.here)

    def machine(self, here: Machine) -> Machine:
        return here

    def choose_cores(self, wanted: int | str | None) -> int:
        if wanted is None and self.cores is not None:
            return self.cores
        cores = self.local_cores if wanted in (None, "all") else int(wanted or 0)
        if problem := self.here.check_cores(cores):
            raise ValueError(problem)
        return cores

    def environment(self, asked: Mapping[str, str]) -> tuple[dict[str, str], tuple[EnvChange, ...]]:
        here = self.here
        changes = environment.environment_changes(self.kernel, here.device, here, here.backend)
        env = environment.run_environment(self.kernel, here.device, asked, here, here.backend)
        return env, tuple(changes)

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        return str(Path.cwd()), tuple(entries)

    def resume(self, run: RunDir) -> str:
        if not run.checkpoints.is_dir():
            raise TpunbError(
                f"run {run.id} has no checkpoint to continue from: a train cell writes them with "
                "`tpunb.save(state, step)`"
            )
        return str(run.checkpoints)

    def notes(self, script: str) -> list[str]:
        return list(self.remarks)
