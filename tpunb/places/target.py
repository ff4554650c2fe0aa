"""`LocalTarget`: this machine, as what takes a run, and what is decided before a run starts.

The hosts of a place are `hosts_target.HostsTarget`, which has the same attributes and methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tpunb.machine import environment, prices
from tpunb.machine.environment import EnvChange
from tpunb.machine.machine import Machine
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Price
from tpunb.utils.errors import TpunbError


@dataclass(frozen=True)
class LocalTarget:
    """This machine, on which the kernel starts runs itself."""

    here: Machine
    kernel: Mapping[str, str] = field(default_factory=dict)
    """The kernel's environment, as far as a run gets it."""
    cores: int | None = None
    """The number of cores of runs without `--cores`; None: the machine's default."""
    remarks: tuple[str, ...] = ()
    """Notes for the user before the run."""
    place_name: ClassVar[str] = ""
    """The place's name; '' for this machine."""
    hosts: ClassVar[tuple[str, ...]] = ()
    """Names of the hosts, for people, in order of node rank; () for this machine."""

    @property
    def price(self) -> Price | None:
        """The price of an hour; None if it is not known."""
        return prices.price_of(self.here)

    def machine(self, here: Machine) -> Machine:
        """One of the hosts as a `Machine`, with facts of `here` where the host's are unknown."""
        return here

    def choose_cores(self, wanted: int | str | None) -> int:
        """The number of ranks of all hosts. Raises ValueError, which names the possible ones."""
        if wanted is None and self.cores is not None:
            return self.cores
        cores = self.here.default_cores if wanted in (None, "all") else int(wanted or 0)
        if problem := self.here.check_cores(cores):
            raise ValueError(problem)
        return cores

    def environment(self, asked: Mapping[str, str]) -> tuple[dict[str, str], tuple[EnvChange, ...]]:
        """The variables for the ranks, `asked` (`--env`) among them, and what was changed for it.

        At a place: in addition to the hosts' own.
        """
        here = self.here
        changes = environment.environment_changes(self.kernel, here.device, here, here.backend)
        env = environment.run_environment(self.kernel, here.device, asked, here, here.backend)
        return env, tuple(changes)

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """The working directory on the hosts, and the entries of `sys.path` that exist there."""
        return str(Path.cwd()), tuple(entries)

    def checkpoints(self, run_id: str) -> str:
        """Where a run saves checkpoints; '' if each host keeps its own."""
        return ""

    def folder(self, path: str) -> str:
        """The hosts' folder for a local one."""
        return path

    def resume(self, run: RunDir) -> str:
        """Where the hosts find the checkpoints of an earlier run. Raises TpunbError."""
        if not run.checkpoints.is_dir():
            raise TpunbError(
                f"run {run.id} has no checkpoint to continue from: a train cell writes them with "
                "`tpunb.save(state, step)`"
            )
        return str(run.checkpoints)

    def notes(self, script: str) -> list[str]:
        """Notes for the user before the run."""
        return list(self.remarks)
