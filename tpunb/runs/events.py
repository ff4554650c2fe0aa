"""What happens during a run, as typed events.

The processes of a run append the ones marked *kept* to `events.jsonl` in the run folder, one
JSON object a line; the kernel reads them there. `Output`, `Metric` and `RankSnapshots` are made by
followers of the run, from the logs, `metrics.jsonl` and the ranks' heartbeats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tpunb.runs import older
from tpunb.runs.chips import Chip
from tpunb.runs.spec import Block, PhaseKind, RunState, Stop
from tpunb.utils import records


@dataclass(frozen=True)
class Phase:
    """Kept. What the run is doing now; `text` says it in words: 'prelude, cell [3]'."""

    kind: PhaseKind
    text: str
    cell: int | None = None
    """Of the prelude: the number shown beside the cell."""
    time: float = 0.0
    position: int | None = None
    """Of the prelude: which of its cells it is, from 1."""
    count: int | None = None
    """Of the prelude: how many cells it has."""
    expected: float | None = None
    """Of the prelude: seconds that the cell took before, in the kernel or in a run; None if that is
    not known."""
    rest: float | None = None
    """Of the prelude: seconds that the cells below it took together, if all of them are known."""

    @classmethod
    def of_prelude(cls, cells: Sequence[Block], index: int, where: str = "") -> Phase:
        """That a cell of the prelude runs now: `cells[index]`, of all that the prelude has.

        `where` says who runs it, if not one process for all ranks: ' on every rank'.
        """
        cell = cells[index]
        known = [below.seconds for below in cells[index + 1 :] if below.seconds is not None]
        return cls(
            PhaseKind.PRELUDE,
            f"prelude{where}, cell {index + 1} of {len(cells)} [{cell.number}]",
            cell.number,
            position=index + 1,
            count=len(cells),
            expected=cell.seconds,
            rest=sum(known) if len(known) == len(cells) - index - 1 else None,
        )


@dataclass(frozen=True)
class Note:
    """Kept. One line for the user."""

    text: str
    time: float = 0.0


@dataclass(frozen=True)
class RanksStarted:
    """Kept. The ranks of an attempt were forked; `pids` in order of rank.

    Of a run on several hosts each says it of its own ranks; in the folder of the whole run it is
    said once, and all pids are 0: they are other machines'.
    """

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
    """Kept. A step of the shutdown sequence began: 'SIGINT', 'SIGTERM' or 'SIGKILL'."""

    step: str
    reason: str
    time: float = 0.0
    stop: Stop | None = None


@dataclass(frozen=True)
class Ended:
    """Kept, last. `result.json` is written and no process is left."""

    state: RunState
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
    """How they are reduced over ranks, where it is not the mean (tpunb.runs.metrics.REDUCTIONS)."""
    time: float = 0.0
    attempt: int = 0


@dataclass(frozen=True)
class Bar:
    """How far a loop has come: `tpunb.track`, or a progress bar that was recognised."""

    name: str
    done: int
    total: int | None = None


@dataclass(frozen=True)
class RankSnapshot:
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
    input_seconds: float = 0.0
    """In which its loops have waited for batches."""


@dataclass(frozen=True)
class RankSnapshots:
    """How the ranks of the attempt stand now, in order of rank; None for one not yet there."""

    ranks: tuple[RankSnapshot | None, ...]
    chips: tuple[Chip, ...] = ()
    """Of all hosts, where there is a TPU that tells."""


Event = RankSnapshots | Phase | Note | RanksStarted | RankEnded | Stopping | Ended | Output | Metric
KEPT: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Phase, Note, RanksStarted, RankEnded, Stopping, Ended)
}


def to_line(event: Event) -> str:
    """An event as a line of `events.jsonl`, with its newline."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def from_line(line: str) -> Event:
    """The inverse of `to_line`. Raises ValueError for a line that is no kept event."""
    data = records.parse(line)
    if isinstance(data, dict) and "event" not in data:
        data = older.upgrade_event(data)
    kind = KEPT.get(str(data.get("event"))) if isinstance(data, dict) else None
    if kind is None:
        raise ValueError("not an event")
    event: Event = records.build(kind, data)
    return event
