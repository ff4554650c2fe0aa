"""`Facts` about a run beside its log, which rules may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpunb.runs.result import signal_name

_MUCH = 0.8
"""The part of the memory from which on its use is worth a line."""


@dataclass(frozen=True)
class Facts:
    """What is known beside the log. Every value may be absent: nothing is assumed then."""

    state: str | None = None
    """How the run ended: 'succeeded', 'failed', 'hung', 'timed_out', 'interrupted'."""
    exits: Mapping[int, int] = field(default_factory=dict)
    """Exit code of each rank that has ended; -9 for a rank ended by signal 9."""
    stage: str | None = None
    """'step' if the run got as far as its training loop."""
    device: str | None = None
    """'TPU' or 'CPU'."""
    oom_killed: bool | None = None
    """True if the cgroup or the kernel's log counts an out-of-memory kill during the run."""
    memory_peak: int | None = None
    """The most memory of each rank, all together, in bytes; shared pages count in each."""
    memory_limit: int | None = None
    """What the machine or container has, in bytes."""
    exceptions: tuple[str, ...] = ()
    """The exceptions that ended ranks, each with its traceback and as a log shows it.

    Then no other exception of the log is the reason: it was handled, or of another process."""
    platform: str | None = None
    """'colab', 'kaggle' or 'gcp': chooses among fixes that differ."""
    lost_hosts: tuple[str, ...] = ()
    """What is said of each host that was lost: 'host h1 was lost: no heartbeat for 20 s'."""
    device_holder: str | None = None
    """Who holds the device now that the run has ended: 'process 4711 of ann (python3)'."""

    @property
    def memory_full(self) -> bool:
        """True if the ranks held nearly all of the memory at their peaks."""
        return bool(
            self.memory_peak and self.memory_limit and self.memory_peak > _MUCH * self.memory_limit
        )

    @property
    def host_lost(self) -> bool:
        """True if a host of the run was lost."""
        return bool(self.lost_hosts)

    def observations(self, stage: str) -> list[str]:
        """The facts that are evidence for a cause of this stage, a line each."""
        lines = [*self.lost_hosts]
        if self.oom_killed:
            lines.append("the kernel's out-of-memory killer ended a process of this run")
        if self.memory_full:
            assert self.memory_peak is not None and self.memory_limit is not None
            peak, limit = self.memory_peak / 2**30, self.memory_limit / 2**30
            lines.append(f"memory of all ranks at their peaks: {peak:.1f} of {limit:.1f} GiB")
        if self.device_holder and stage == "start":
            lines.append(f"the device is held by {self.device_holder}")
        return lines


def exit_name(code: int) -> str:
    """'SIGKILL' for -9 and for a shell's 137, '17' for 17."""
    if code < 0:
        return signal_name(-code)
    if 128 < code < 128 + 65 and not signal_name(code - 128).startswith("signal"):
        return signal_name(code - 128)
    return str(code)
