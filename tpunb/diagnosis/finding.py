"""What goes into a diagnosis beside the log, and what comes out of it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpunb.models import signal_name
from tpunb.telling import Told

WIDTH = 96
"""Columns of the text form."""
_HEIGHT = 20
"""Lines of it, at most."""
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
    device_holder: str | None = None
    """Who holds the device now that the run has ended: 'process 4711 of ann (python3)'."""

    def observations(self, stage: str) -> list[str]:
        """What of this speaks for a cause of this stage: one line each."""
        lines = []
        if self.oom_killed:
            lines.append("the kernel's out-of-memory killer ended a process of this run")
        if self.memory_peak and self.memory_limit and self.memory_peak > _MUCH * self.memory_limit:
            peak, limit = self.memory_peak / 2**30, self.memory_limit / 2**30
            lines.append(f"memory of all ranks at their peaks: {peak:.1f} of {limit:.1f} GiB")
        if self.device_holder and stage == "start":
            lines.append(f"the device is held by {self.device_holder}")
        return lines


@dataclass(frozen=True)
class Evidence:
    """A line that speaks for a cause; the ranks that wrote it and the cell it names, if known."""

    text: str
    ranks: tuple[int, ...] = ()
    cell: int | None = None

    def __str__(self) -> str:
        where = []
        if self.ranks:
            many = "s" if len(self.ranks) > 1 else ""
            where.append(f"rank{many} {', '.join(map(str, self.ranks))}")
        if self.cell is not None:
            where.append(f"cell [{self.cell}]")
        return f"{', '.join(where)}: {self.text}" if where else self.text


@dataclass(frozen=True, repr=False)
class Diagnosis(Told):
    """One possible cause of a failure, with what speaks for it and what to do."""

    id: str
    """The rule's id, e.g. 'hbm-oom'."""
    cause: str
    fix: str
    evidence: tuple[Evidence, ...]
    confidence: float
    """From 0 to 1: how sure the rule is that this is the cause, not a consequence."""
    link: str
    """Where this is reported or documented."""

    def to_json(self) -> dict[str, Any]:
        """What `tpunb diagnose --json` prints for this cause."""
        return {
            "id": self.id,
            "cause": self.cause,
            "fix": self.fix,
            "evidence": [str(line) for line in self.evidence],
            "confidence": self.confidence,
        }

    def told(self) -> str:
        """Cause, evidence, fix and link: never more than 20 lines."""
        cause = _wrapped(f"{self.cause} [{self.id}]", "", 5)
        rest = [*_wrapped(self.fix, "  fix: ", 8), _cut(f"  see {self.link}")]
        evidence = [part for line in self.evidence for part in _wrapped(str(line), "  | ", 2)]
        return "\n".join([*cause, *evidence[: _HEIGHT - len(cause) - len(rest)], *rest])


class Causes(Told, list[Diagnosis]):
    """Possible causes, the likeliest first. A list that shows itself as they do."""

    def told(self) -> str:
        """All of them."""
        return "\n\n".join(map(str, self)) or "[]"


def exit_name(code: int) -> str:
    """'SIGKILL' for -9 and for a shell's 137, '17' for 17."""
    if code < 0:
        return signal_name(-code)
    if 128 < code < 128 + 65 and not signal_name(code - 128).startswith("signal"):
        return signal_name(code - 128)
    return str(code)


def _wrapped(text: str, label: str, most: int) -> list[str]:
    """The text in at most this many lines, behind a label."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        max_lines=most,
        placeholder=" …",
    )


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 2] + " …"
