"""`Facts` about a run in addition to its log, which rules can require."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpunb.runs.result import signal_name
from tpunb.runs.spec import BackendName

_MUCH = 0.8
"""Fraction of the memory above which its use counts as evidence."""


@dataclass(frozen=True)
class Facts:
    """Facts in addition to the log. Every value may be absent; nothing is assumed then."""

    state: str | None = None
    """How the run ended: 'succeeded', 'failed', 'hung', 'timed_out', 'interrupted'."""
    exits: Mapping[int, int] = field(default_factory=dict)
    """Exit code of each rank that has ended; -9 for a rank that signal 9 ended."""
    trained: bool = False
    """True if the run got as far as its training loop."""
    backend: BackendName | None = None
    """What the run trained with: no cause or fix is about another backend."""
    oom_killed: bool | None = None
    """True if the cgroup or the kernel's log counts an out-of-memory kill during the run."""
    memory_peak: int | None = None
    """The sum of the ranks' peak memory, in bytes; shared pages count for each rank."""
    memory_limit: int | None = None
    """The memory of the machine or container, in bytes."""
    exceptions: tuple[str, ...] = ()
    """The exceptions that ended ranks, each with its traceback, as a log shows it.

    If there are any, no other exception in the log is the reason: it was handled, or belongs to
    another process."""
    platform: str | None = None
    """'colab', 'kaggle' or 'gcp': chooses among fixes that differ."""
    lost_hosts: tuple[str, ...] = ()
    """The message about each lost host: 'host h1 was lost: no heartbeat for 20 s'."""
    device_holder: str | None = None
    """The process that holds the device after the run: 'process 4711 of ann (python3)'."""

    @property
    def memory_full(self) -> bool:
        """True if the ranks' peaks together used nearly all of the memory."""
        return bool(
            self.memory_peak and self.memory_limit and self.memory_peak > _MUCH * self.memory_limit
        )

    @property
    def host_lost(self) -> bool:
        return bool(self.lost_hosts)

    def observations(self, *, at_start: bool) -> list[str]:
        """The facts that are evidence, one line for each.

        `at_start`: for a cause that only occurs before a run trains, such as a device in use.
        """
        lines = [*self.lost_hosts]
        if self.oom_killed:
            lines.append("the kernel's out-of-memory killer ended a process of this run")
        if self.memory_full:
            assert self.memory_peak is not None and self.memory_limit is not None
            peak, limit = self.memory_peak / 2**30, self.memory_limit / 2**30
            lines.append(f"memory of all ranks at their peaks: {peak:.1f} of {limit:.1f} GiB")
        if self.device_holder and at_start:
            lines.append(f"the device is held by {self.device_holder}")
        return lines


def exit_name(code: int) -> str:
    """'SIGKILL' for -9 and for a shell's 137, '17' for 17."""
    if code < 0:
        return signal_name(-code)
    if 128 < code < 128 + 65 and not signal_name(code - 128).startswith("signal"):
        return signal_name(code - 128)
    return str(code)
