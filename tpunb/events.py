"""What happens during a run, as typed events.

The processes of a run append the ones marked *kept* to `events.jsonl` in the run folder, one
JSON object a line; the kernel reads them there. `Output`, `Metric` and `Life` are made by
whoever reads the logs, `metrics.jsonl` and the ranks' pulses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """Kept. What the run is doing now, in words: 'prelude, cell [3]', 'training'."""

    text: str
    time: float = 0.0


@dataclass(frozen=True)
class Note:
    """Kept. One line that the person should see once."""

    text: str
    time: float = 0.0


@dataclass(frozen=True)
class RanksStarted:
    """Kept. The ranks of an attempt were forked; `pids` in order of rank."""

    attempt: int
    pids: tuple[int, ...]
    time: float = 0.0


@dataclass(frozen=True)
class RankEnded:
    """Kept. A rank has ended. `exitcode` is negative for a signal, as in subprocess."""

    attempt: int
    rank: int
    exitcode: int
    time: float = 0.0
    peak: int = 0
    """The most memory it has held at once, in bytes; pages shared with other ranks count."""


@dataclass(frozen=True)
class Stopping:
    """Kept. A step of the stop ladder was taken: 'SIGINT', 'SIGTERM' or 'SIGKILL'."""

    step: str
    reason: str
    time: float = 0.0


@dataclass(frozen=True)
class Ended:
    """Kept, last. `result.json` is written and no process is left."""

    state: str
    time: float = 0.0


@dataclass(frozen=True)
class Output:
    """Text that a rank has written, as it came: any length, not always whole lines.

    `rank` is None for the prelude that runs once for all ranks. `stream` is 'stdout',
    'stderr' or 'prelude' (what the prelude wrote, in a rank or for all of them).
    """

    rank: int | None
    stream: str
    text: str


@dataclass(frozen=True)
class Metric:
    """One call of `tpunb.log` in a rank."""

    rank: int
    step: int | None
    values: Mapping[str, float] = field(default_factory=dict)
    reduce: Mapping[str, str] = field(default_factory=dict)
    """How they are reduced over ranks, where it is not the mean (tpunb.records.REDUCTIONS)."""
    time: float = 0.0
    attempt: int = 0


@dataclass(frozen=True)
class Bar:
    """How far a loop has come: `tpunb.track`, or a progress bar that was recognised."""

    name: str
    done: int
    total: int | None = None


@dataclass(frozen=True)
class RankLife:
    """How one rank stands at one moment. Counts grow within an attempt."""

    begun: bool = False
    """Whether its train cell has begun."""
    steps: int = 0
    collectives: int = 0
    waiting: bool = False
    """For other ranks, in a collective."""
    compiling: bool = False
    compilations: int = 0
    compile_seconds: float = 0.0
    memory: int = 0
    """Bytes in RAM now; pages that it shares with other ranks count too."""
    bars: tuple[Bar, ...] = ()
    """Of `tpunb.track`, the outermost first."""
    samples: int = 0
    """Rows of the batches that the innermost `tpunb.track` has handed out."""


@dataclass(frozen=True)
class Life:
    """How the ranks of the attempt stand now, in order of rank; None for one not yet there."""

    ranks: tuple[RankLife | None, ...]


Event = Life | Phase | Note | RanksStarted | RankEnded | Stopping | Ended | Output | Metric
KEPT: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Phase, Note, RanksStarted, RankEnded, Stopping, Ended)
}


def to_line(event: Event) -> str:
    """An event as a line of `events.jsonl`, with its newline."""
    return json.dumps({"kind": type(event).__name__, **asdict(event)}) + "\n"


def from_line(line: str) -> Event:
    """The inverse of `to_line`. Raises KeyError for a kind that is not kept."""
    data = json.loads(line)
    kind = KEPT[data.pop("kind")]
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
    event: Event = kind(**values)
    return event
