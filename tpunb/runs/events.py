"""Typed events of a run.

The processes of a run append the events marked *kept* to `events.jsonl` in the run folder, one
JSON object per line, and the kernel reads them. Followers of the run make `Output`, `Metric` and
`RankSnapshots` from the logs, `metrics.jsonl` and the ranks' heartbeats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tpunb.runs.chips import Chip
from tpunb.runs.spec import Block, PhaseKind, RunState, Stop
from tpunb.utils import records


@dataclass(frozen=True)
class Phase:
    """Kept. The current phase of the run; `text` describes it: 'prelude, cell [3]'."""

    kind: PhaseKind
    text: str
    cell: int | None = None
    """In the prelude: the number shown next to the running cell."""
    time: float = 0.0
    position: int | None = None
    """In the prelude: the position of the cell among its cells, from 1."""
    count: int | None = None
    """In the prelude: the number of its cells."""
    expected: float | None = None
    """In the prelude: seconds that the cell took before, in the kernel or in a run; None if not
    known."""
    rest: float | None = None
    """In the prelude: seconds that all cells after it took before; None if any is not known."""

    @classmethod
    def of_prelude(cls, cells: Sequence[Block], index: int, where: str = "") -> Phase:
        """Make the phase in which `cells[index]` of the prelude runs.

        Other train cells, of which only the values are read, are not counted.

        `where`: ' on every rank' if the ranks run it, not one process for all ranks.
        """
        cell = cells[index]
        if cell.values:
            text = f"prelude{where}, reading the values of cell [{cell.number}]"
            return cls(PhaseKind.PRELUDE, text, cell.number)
        own = [each for each in cells if not each.values]
        at = own.index(cell)
        known = [below.seconds for below in own[at + 1 :] if below.seconds is not None]
        return cls(
            PhaseKind.PRELUDE,
            f"prelude{where}, cell {at + 1} of {len(own)} [{cell.number}]",
            cell.number,
            position=at + 1,
            count=len(own),
            expected=cell.seconds,
            rest=sum(known) if len(known) == len(own) - at - 1 else None,
        )


@dataclass(frozen=True)
class Note:
    """Kept. A line for the user."""

    text: str
    time: float = 0.0
    minor: bool = False
    """True for what changes nothing: the card of the ended run has it in its fold."""


@dataclass(frozen=True)
class RanksStarted:
    """Kept. The ranks of an attempt were forked; `pids` are in order of rank.

    In a run on several hosts, each host emits it for its own ranks. The folder of the whole run
    has it once, with all pids 0, because the processes are on other machines.
    """

    attempt: int
    pids: tuple[int, ...]
    time: float = 0.0


@dataclass(frozen=True)
class Figure:
    """Kept. Rank 0 has drawn a figure (`RunDir.figure`). One with a known number replaces it."""

    attempt: int
    number: int
    time: float = 0.0


@dataclass(frozen=True)
class Resumed:
    """Kept. Rank 0 has loaded the checkpoint of this step, from where `--resume` names."""

    step: int
    time: float = 0.0


@dataclass(frozen=True)
class RankEnded:
    """Kept. A rank has ended. `exitcode` is negative for a signal, as in subprocess."""

    attempt: int
    rank: int
    exitcode: int
    time: float = 0.0
    peak: int = 0
    """Its peak memory in bytes, including pages shared with other ranks."""


@dataclass(frozen=True)
class Stopping:
    """Kept. A step of the shutdown sequence has begun: 'SIGINT', 'SIGTERM' or 'SIGKILL'."""

    step: str
    reason: str
    time: float = 0.0
    stop: Stop | None = None


@dataclass(frozen=True)
class Ended:
    """Kept, the last event. `result.json` is written and no process is left."""

    state: RunState
    time: float = 0.0


@dataclass(frozen=True)
class Output:
    """Text that a rank has written, of any length, not always whole lines.

    `rank` is None for the prelude that runs once for all ranks. `stream` is 'stdout', 'stderr' or
    'prelude' (the output of the prelude, in a rank or for all ranks).
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
    """The reductions over ranks of values that are not averaged (tpunb.runs.metrics.REDUCTIONS)."""
    time: float = 0.0
    attempt: int = 0


@dataclass(frozen=True)
class Bar:
    """The progress of a loop: `tpunb.track`, or a progress bar that was recognised."""

    name: str
    done: int
    total: int | None = None


@dataclass(frozen=True)
class RankSnapshot:
    """The counts and state of one rank at one moment. Counts grow within an attempt."""

    begun: bool = False
    """True once its train cell has begun."""
    steps: int = 0
    collectives: int = 0
    waiting: bool = False
    """True while it waits for other ranks in a collective."""
    compiling: bool = False
    compilations: int = 0
    compile_seconds: float = 0.0
    memory: int = 0
    """Bytes in RAM, including pages that it shares with other ranks."""
    bars: tuple[Bar, ...] = ()
    """The loops of `tpunb.track`, outermost first."""
    samples: int = 0
    """Rows of the batches that the innermost `tpunb.track` has yielded."""
    input_seconds: float = 0.0
    """Seconds that its loops have waited for batches."""


@dataclass(frozen=True)
class RankSnapshots:
    """Snapshots of an attempt's ranks, in order of rank; None for a rank that has not started."""

    ranks: tuple[RankSnapshot | None, ...]
    chips: tuple[Chip, ...] = ()
    """The chips of all hosts; () if there are no values."""


Event = (
    RankSnapshots
    | Phase
    | Note
    | RanksStarted
    | Figure
    | Resumed
    | RankEnded
    | Stopping
    | Ended
    | Output
    | Metric
)
KEPT: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Phase, Note, RanksStarted, Figure, Resumed, RankEnded, Stopping, Ended)
}


def to_line(event: Event) -> str:
    """Return an event as a line of `events.jsonl`, with its newline."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def from_line(line: str) -> Event:
    """Parse a line of `to_line`. Raises ValueError for a line that is not a kept event."""
    data = records.parse(line)
    kind = KEPT.get(str(data.get("event"))) if isinstance(data, dict) else None
    if kind is None:
        raise ValueError("not an event")
    event: Event = records.build(kind, data)
    return event
