"""`Backend`: what ranks train with, as the rest of tpunb sees it.

Standard library only: the kernel and the supervisor import this package without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tpunb.runs.heartbeat import Counts
from tpunb.runs.spec import BackendName, Device


@dataclass(frozen=True)
class RankSetup:
    """One rank among all, and its device."""

    device: Device
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    spmd: int | None = None
    """The cores that this process drives alone, in torch_xla's SPMD mode; None in other modes."""

    @property
    def hosts(self) -> int:
        """The hosts of the run, which have equally many ranks."""
        return self.world_size // self.local_world_size


class Backend(Protocol):
    """What ranks train with. One per process; its methods are called in this order."""

    name: BackendName
    modules: tuple[str, ...]
    """Imported by the fork server. None of them starts a thread or touches a device."""
    has_programs: bool
    """True if the operations of a step form programs, which are compiled and started."""

    def warm(self, device: Device) -> None:
        """In the fork server, after the imports."""

    def fork_problem(self) -> str | None:
        """Why this process must not be forked, as a verb phrase: 'uses an XLA device'; or None."""

    def launch_environment(self, ranks: int, node_rank: int, hosts: int) -> Mapping[str, str]:
        """Variables that the ranks of this host need, besides those of torchrun.

        Called in the agent before it forks its `ranks`, again for each attempt.
        """
        ...

    def prepare(self, setup: RankSetup) -> None:
        """In a rank, before any of the user's code: give it its device and its peers."""

    def start(self, setup: RankSetup) -> None:
        """Right before the train cell, after the prelude."""

    def counts(self) -> Counts:
        """The counts for the heartbeat."""
        ...

    def finish(self) -> None:
        """After the train cell: end the device's pending work."""
