"""How a run ended: RunResult with its failures, summary, causes and errors; `result.json`.

Standard library only: the supervisor writes it. pandas and matplotlib are imported on use.
"""

from __future__ import annotations

import signal as signals
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.runs import metrics, older
from tpunb.runs.metrics import Best, Curve
from tpunb.runs.spec import (
    MOST_RANKS,
    Device,
    FailureKind,
    Price,
    RunState,
    Stop,
    StopCause,
    count_cores,
)
from tpunb.runs.step_times import StepTimes
from tpunb.utils import records
from tpunb.utils.errors import TpunbError
from tpunb.utils.terminal import Printable, Style, join, paint, paint_first_line
from tpunb.utils.text import name_ranks, size

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_PROCESS_ENDS = (FailureKind.SIGNAL, FailureKind.EXIT, FailureKind.OUT_OF_MEMORY)
_OURS = (FailureKind.LOST, FailureKind.HOST_LOST, FailureKind.REFUSED)
_MOST_ATTEMPTS = 10_000
_WIDTH = 96
"""Columns of a diagnosis as text."""
_HEIGHT = 20
"""Lines of it, at most."""
_LONGEST = 500
"""Characters of a message in a headline."""


@dataclass(frozen=True)
class Failure:
    """How one process of a run failed."""

    rank: int | None
    """None: the prelude, or a process of tpunb itself."""
    pid: int | None
    exitcode: int | None
    signal: str | None
    """'SIGKILL', … if a signal ended it. Both are None if the stop met it on its way out."""
    type: str
    """The exception's class name, or 'Signal', 'Exit', 'Hang' or 'Lost'."""
    message: str
    cell: int | None
    line: int | None
    traceback: str
    """In notebook terms, ready to be shown."""
    time: float
    """Seconds since the epoch."""
    source: tuple[tuple[int, str], ...] = ()
    """The lines of the cell around the one where it failed, with their numbers."""
    cell_id: str | None = None
    """nbformat's id of the cell, if it has one."""
    kind: FailureKind = FailureKind.EXCEPTION
    column: int | None = None
    """Where in its line the failed expression begins, in characters from 0; Python 3.11 knows."""
    host: str | None = None
    """The name of the host that it was on; None for a run on one machine."""

    @property
    def who(self) -> str:
        """'rank 3', 'rank host-1/3', 'the prelude', 'the prelude on host-1'."""
        if self.rank is None:
            return f"the prelude on {self.host}" if self.host else "the prelude"
        return f"rank {self.host}/{self.rank}" if self.host else f"rank {self.rank}"

    def is_like(self, other: Failure) -> bool:
        """True if another rank failed in the same way at the same line."""
        return (self.type, self.cell, self.line) == (other.type, other.cell, other.line)

    @classmethod
    def from_json(cls, data: object) -> Failure:
        """An entry of `failures` in `result.json`. Raises ValueError."""
        failure = records.build(cls, data)
        if isinstance(data, Mapping) and "kind" not in data:
            kind = older.failure_kind(failure.type, failure.message)
            failure = replace(failure, kind=kind)
        return failure

    def headline(self) -> str:
        """One line: who, where, what."""
        first = self.message.strip().partition("\n")[0]
        if len(first) > _LONGEST:
            first = f"{first[:_LONGEST]} …"
        if self.kind in _OURS:  # a process of tpunb, or a host: it has no cell
            return first
        place = "" if self.cell is None else f" in cell [{self.cell}]"
        if self.cell is not None and self.line is not None:
            place += f", line {self.line}"
        if self.kind in _PROCESS_ENDS:
            return f"{self.who} {self.message}{place}"
        if self.rank is None and place:
            on = f" on {self.host}" if self.host else ""
            failed = f"re-running{place.removeprefix(' in')} for the ranks{on} failed"
            return f"{failed}: {self.type}: {first}".rstrip(": ")
        return f"{self.who} failed{place}: {self.type}: {first}".rstrip(": ")


@dataclass(frozen=True)
class Collective:
    """One collective operation in one rank of a rehearsal, all its calls together."""

    rank: int
    operation: str
    """'all_reduce sum', 'all_gather', 'rendezvous', …"""
    calls: int
    bytes: int
    """What this rank contributed. A TPU's cores contribute as much."""
    waited: float
    """Seconds until all participants had arrived."""
    took: float
    """Seconds from then on."""


def count_collectives(rows: Sequence[Collective]) -> str:
    """'120 collectives, 4.7 GB': of the rank with the most of each."""
    calls = _largest_sum(rows, "calls")
    return f"{calls:,.0f} collective{'s' if calls != 1 else ''}, {_bytes_of(rows)}"


def describe_collectives(rows: Sequence[Collective]) -> str:
    """A sentence about one rank, and what of it holds for a TPU."""
    per_operation: dict[str, int] = {}
    for row in rows:
        per_operation[row.operation] = max(row.calls, per_operation.get(row.operation, 0))
    operations = ", ".join(f"{calls:,} {name}" for name, calls in per_operation.items())
    return (
        f"each rank: {count_collectives(rows)} ({operations}), "
        f"{_largest_sum(rows, 'took'):.1f} s; waited up to "
        f"{_largest_sum(rows, 'waited'):.1f} s for other ranks. CPU simulation: the same "
        "collectives and bytes as on a TPU, not the same timings"
    )


def _largest_sum(rows: Sequence[Collective], name: str) -> float:
    """The largest sum of one rank."""
    sums: dict[int, float] = {}
    for row in rows:
        sums[row.rank] = sums.get(row.rank, 0) + getattr(row, name)
    return max(sums.values(), default=0)


def _bytes_of(rows: Sequence[Collective]) -> str:
    return size(int(_largest_sum(rows, "bytes")))


@dataclass(frozen=True)
class Advice:
    """Something to know about a run that ended well, and what to do about it."""

    message: str
    fix: str


@dataclass(frozen=True)
class Summary:
    """Best metrics, time per phase and warnings of a finished run (`tpunb.runs.summary`)."""

    best: tuple[Best, ...] = ()
    spent: tuple[tuple[str, float], ...] = ()
    """What took how many seconds."""
    advice: tuple[Advice, ...] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """The course of each metric, by name."""
    chips: str = ""
    """What the TPU did, in words."""
    steps: StepTimes | None = None
    """Of `--profile`: where the time of a step went …"""
    trace: str = ""
    """… and the command that opens the trace."""

    def lines(self) -> list[str]:
        """As text, a line for each part that there is."""
        lines = []
        if self.best:
            lines.append(" · ".join(map(str, self.best)))
        if self.spent:
            lines.append("time: " + " · ".join(f"{what} {took:.1f} s" for what, took in self.spent))
        lines += [self.chips] if self.chips else []
        if self.steps is not None:
            lines.append(str(self.steps))
        lines += [f"to open the trace: {self.trace}"] if self.trace else []
        return lines + [f"note: {advice.message} → {advice.fix}" for advice in self.advice]


@dataclass(frozen=True)
class Evidence:
    """A line of a log that supports a cause, the ranks that wrote it and the cell it names."""

    text: str
    ranks: tuple[int, ...] = ()
    cell: int | None = None

    def __str__(self) -> str:
        where = []
        if self.ranks:
            where.append(f"rank{'s' if len(self.ranks) > 1 else ''} {name_ranks(self.ranks)}")
        if self.cell is not None:
            where.append(f"cell [{self.cell}]")
        return f"{', '.join(where)}: {self.text}" if where else self.text


@dataclass(frozen=True, repr=False)
class Diagnosis(Printable):
    """One possible cause of a failure, its evidence and what to do."""

    id: str
    """The rule's id, e.g. 'hbm-oom'."""
    cause: str
    fix: str
    evidence: tuple[Evidence, ...]
    confidence: float
    """From 0 to 1: how sure the rule is that this is the cause, not a consequence."""
    link: str
    """Where this is reported or documented."""
    steps: tuple[str, ...] = ()
    """`fix` as a list: what to do first, then."""

    def to_json(self) -> dict[str, Any]:
        """What `tpunb diagnose --json` prints for this cause."""
        return {
            "id": self.id,
            "cause": self.cause,
            "fix": self.fix,
            "evidence": [str(line) for line in self.evidence],
            "confidence": self.confidence,
        }

    def __str__(self) -> str:
        """Cause, evidence, fix and link: at most 20 lines."""
        cause = [paint(line, Style.STRONG) for line in _wrap(f"{self.cause} [{self.id}]", "", 5)]
        first, *more = self._fix_lines()
        link = paint(_shorten(f"  see {self.link}"), Style.FAINT)
        rest = [paint(first, Style.STRONG, end=len("  fix:")), *more, link]
        wrapped = (part for line in self.evidence for part in _wrap(str(line), "  | ", 2))
        evidence = [paint(line, Style.FAINT) for line in wrapped]
        return join("\n", [*cause, *evidence[: _HEIGHT - len(cause) - len(rest)], *rest])

    def _fix_lines(self) -> list[str]:
        """The steps, each on lines of its own; numbered if there are several."""
        steps = self.steps or (self.fix,)
        if len(steps) == 1:
            return _wrap(steps[0], "  fix: ", 8)
        lines = []
        for number, step in enumerate(steps, start=1):
            label = "  fix: " if number == 1 else " " * 7
            lines += _wrap(f"{number}. {step}", label, 8)
        return lines


class Causes(Printable, list[Diagnosis]):
    """Possible causes, the likeliest first."""

    def __str__(self) -> str:
        return join("\n\n", map(str, self)) or "[]"


def _wrap(text: str, label: str, most: int) -> list[str]:
    """The text in at most this many lines, behind a label."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,  # commands are copied
    )


def _shorten(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 2] + " …"


STATE_STYLES = {
    RunState.STARTING: Style.ACTIVE,
    RunState.WAITING: Style.ACTIVE,
    RunState.RUNNING: Style.ACTIVE,
    RunState.STOPPING: Style.ODD,
    RunState.SUCCEEDED: Style.GOOD,
    RunState.FAILED: Style.BAD,
    RunState.HUNG: Style.BAD,
    RunState.TIMED_OUT: Style.ODD,
    RunState.INTERRUPTED: Style.ODD,
    RunState.LOST: Style.BAD,
    RunState.AWAY: Style.ODD,
}


_STOPPED = {RunState.TIMED_OUT: "stopped at the time-out", RunState.INTERRUPTED: "stopped"}


@dataclass(frozen=True, repr=False)
class RunResult(Printable):
    """How a run ended and what it left. `result.json` holds the same."""

    state: RunState
    """One that is not `active`."""
    name: str
    world_size: int
    device: Device
    started: float
    """Seconds since the epoch, as `ended`."""
    ended: float
    dir: Path
    returncode: int | None = 0
    attempts: int = 1
    failures: tuple[Failure, ...] = ()
    """Earliest first."""
    peak_memory: tuple[int, ...] = ()
    """The most memory that each rank held at once, in bytes; shared pages count in each."""
    memory_limit: int = 0
    """Memory of this container or machine in bytes; 0 if it is not known."""
    collectives: tuple[Collective, ...] = ()
    """Of a rehearsal: how many, how many bytes and how long, by rank and operation."""
    warm: bool = False
    replicated: bool = False
    """True if every rank ran the prelude itself."""
    replicate_reason: str = ""
    """Why it did."""
    reason: str = ""
    """Why the run was stopped, in words; empty if it was not."""
    stop: Stop | None = None
    """The same as data."""
    price: Price | None = None
    """What the machine cost, as far as that was known when the run began."""
    returns: Mapping[str, Any] = field(default_factory=dict)
    """Values of `--returns` from rank 0, tensors on the CPU."""
    returns_failed: Mapping[str, str] = field(default_factory=dict)
    """Names of `--returns` that did not arrive, and why."""
    spmd: int | None = None
    """How many cores the one rank drove in torch_xla's SPMD mode; None: each rank had one."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What `tpunb.runs()` shows as `params.*`: `tpunb.runs.parameters.parameters`."""
    resumed_from: str | None = None
    """The run, folder or URL whose last checkpoint it began with (`--resume`)."""
    hosts: tuple[str, ...] = ()
    """The names of the hosts in order of node rank; (): it ran on the kernel's machine."""
    place: str = ""
    """What `--on` named; '' for the kernel's machine."""
    diagnoses: tuple[Diagnosis, ...] = ()
    """Possible causes of a failure, the likeliest first."""
    summary: Summary = field(default_factory=Summary)

    def to_json(self) -> dict[str, Any]:
        """The content of `result.json`: of returns the names, without the folder itself."""
        data = asdict(replace(self, returns={}, diagnoses=(), summary=Summary()))
        del data["dir"], data["returns_failed"], data["diagnoses"], data["summary"]
        return {**data, "returns": list(self.returns), "cost": self.cost}

    @classmethod
    def from_json(cls, data: object, folder: Path) -> RunResult:
        """What `to_json` wrote, without values of returns. Raises ValueError."""
        if not isinstance(data, Mapping) or not isinstance(data.get("failures"), (list, tuple)):
            raise ValueError("not a RunResult")
        values = {name: data[name] for name in data if name not in ("returns", "cost")}
        values["failures"] = list(map(Failure.from_json, data["failures"]))
        if "stop" not in data:
            values["stop"] = older.upgrade_stop(str(data.get("reason", "")))
        result = records.build(cls, {**values, "dir": folder})
        plausible = 0 < result.world_size <= MOST_RANKS and result.attempts <= _MOST_ATTEMPTS
        if not plausible or result.state.active:
            raise ValueError("not the end of a run")
        return result

    @property
    def failure(self) -> Failure | None:
        """The first failure, which is the root cause of those that follow."""
        return self.failures[0] if self.failures else None

    @property
    def duration(self) -> float:
        """Seconds from the start to the end of the last process."""
        return self.ended - self.started

    @property
    def cost(self) -> float | None:
        """What the machine cost during the run, in dollars or `price.unit`; None if not known.

        `price` says of which machine, and when the price was read.
        """
        return None if self.price is None else round(self.price.cost(self.duration), 4)

    def metrics(self, *, reduced: bool = False) -> pd.DataFrame:
        """What `tpunb.log` recorded: a row per call and rank, in order of time.

        Columns `step`, `rank`, `time` (seconds since the run's start), then the metrics. With
        `reduced` a row per step, without `rank`: each metric over the ranks as `tpunb.log` was
        told (`reduce=`, the mean by default). After a retry a step counts once. Of more than 50 MB
        of metrics, parts at equal distances are read, with a UserWarning.
        """
        metrics.warn_if_spread(self.dir / "metrics.jsonl")
        rows = metrics.read_rows(self.dir / "metrics.jsonl")
        return metrics.to_frame(rows, self.started, reduced=reduced)

    def plot(self, *others: RunResult) -> Figure:
        """A matplotlib figure with a panel for each metric; with `others` a line for each run.

        Reduced over ranks, by step. Raises MissingPackageError without matplotlib, ValueError
        if nothing was logged.
        """
        from tpunb.runs.figures import panels

        runs = (self, *others)
        names = [run.name for run in runs]
        unique = len(set(names)) == len(names)
        frames = {}
        for run in runs:
            metrics.warn_if_spread(run.dir / "metrics.jsonl", metrics.DRAWN)
            rows = metrics.read_rows(run.dir / "metrics.jsonl", metrics.DRAWN)
            frame = metrics.to_frame(rows, run.started, reduced=True, whole=True)
            frames[run.name if unique else run.dir.name] = frame
        return panels(frames)

    def raise_for_failure(self) -> None:
        """Raise the RunError of this result's state; nothing if the run succeeded."""
        if (error := _ERRORS.get(self.state)) is not None:
            raise error(self)

    def cores(self) -> str:
        """'4 rehearsal cores', '8 TPU cores on 2 hosts', '4 rehearsal cores (SPMD)'."""
        cores = count_cores(self.spmd or self.world_size, self.device, len(self.hosts))
        return f"{cores} (SPMD)" if self.spmd else cores

    def explain(self, *, traceback: bool = True) -> str:
        """The end of the run in words: what, where, why, what to do, and the log's path.

        The first failure's `traceback` comes last.
        """
        lines = [*self._what_happened(), *self._missing_returns()]
        if self.diagnoses:
            lines += [str(self.diagnoses[0]), ""]
        if self.state == RunState.FAILED and self.failure is not None and self.failure.traceback:
            if traceback:
                lines += [*([""] if lines[-1] else []), self.failure.traceback.rstrip(), ""]
            else:
                lines.append(
                    "traceback: print(tpunb.last_run.explain()), or unfold it in a notebook's card"
                )
        lines += self._how_to_continue()
        lines += self.summary.lines()
        if self.price is not None:
            lines.append(self.price.describe_cost(self.duration))
        lines.append(f"log: {self.dir / 'run.log'}")
        return join("\n", lines)

    def headline(self) -> str:
        """The end of the run in one line."""
        if self.state == RunState.SUCCEEDED:
            return f"succeeded on {self.cores()} after {self.duration:.1f} s{self.lacks()}"
        if self.state == RunState.FAILED and self.failure is not None:
            return self.failure.headline()
        reason = f" ({self.reason})" if self.reason else ""
        return f"{_STOPPED.get(self.state, self.state)}{reason} after {self.duration:.1f} s"

    def remarks(self) -> list[str]:
        """What belongs to a failed run's headline: other failures, missing values, what to do."""
        lines = []
        if self.failure is not None and self.state == RunState.FAILED:
            lines += self._other_failures(self.failure)
        if self.state == RunState.HUNG:
            lines.append(f"stacks of all ranks: {self.dir / 'attempts'}")
        return [*lines, *self._missing_returns(), *self._how_to_continue()]

    def lacks(self) -> str:
        """', but wieghts was not returned', of a run that succeeded; '' if nothing is missing."""
        if self.state != RunState.SUCCEEDED or not self.returns_failed:
            return ""
        were = "were" if len(self.returns_failed) > 1 else "was"
        return f", but {', '.join(self.returns_failed)} {were} not returned"

    def _missing_returns(self) -> list[str]:
        if self.state != RunState.SUCCEEDED and not self.returns:  # nobody expects values
            return []
        return [f"{name} was not returned: {why}" for name, why in self.returns_failed.items()]

    def _how_to_continue(self) -> list[str]:
        if self.state != RunState.SUCCEEDED and any(self.dir.glob("checkpoints/*.pt")):
            return [f"to continue from its last checkpoint: %%tpu_train --resume {self.dir.name}"]
        if self.stop is not None and self.stop.cause is StopCause.PREEMPTED:
            return [
                "run it again on another machine; with tpunb.save(state, step) in the train cell "
                "a run continues from where it was"
            ]
        return []

    def _what_happened(self) -> list[str]:
        failure = self.failure
        if self.state == RunState.SUCCEEDED:
            style = Style.ODD if self.lacks() else Style.GOOD
            return [paint(self.headline(), style, end=len("succeeded"))]
        if failure is not None and self.state == RunState.HUNG:
            return [
                paint_first_line(failure.message, Style.BAD),
                f"stacks of all ranks: {self.dir / 'attempts'}",
            ]
        if failure is not None and self.state == RunState.FAILED:
            source = ["", *number_lines(failure.source, failure.line), ""] if failure.source else []
            return [paint(failure.headline(), Style.BAD), *source, *self._other_failures(failure)]
        text = self.headline()
        stopped = paint(text, STATE_STYLES[self.state], end=text.rindex(" after "))
        return [join("", [stopped, f"; all {self.world_size} ranks have ended"])]

    def _other_failures(self, first: Failure) -> list[str]:
        """What else failed, in a line or two: ranks that failed alike, and how the next did."""
        rest = [failure for failure in self.failures[1:] if failure.rank is not None]
        alike = [failure for failure in rest if failure.is_like(first)]
        lines = []
        if alike:
            numbers = [f.rank for f in alike if f.rank is not None]
            ranks = name_ranks(numbers, self.hosts, self.world_size)
            lines.append(f"the same in rank{'s' if len(alike) > 1 else ''} {ranks}")
        others = [failure for failure in rest if failure not in alike]
        if others:
            lines.append(f"then: {others[0].headline()}")
        if len(others) > 1:
            lines.append(f"then: {len(others) - 1} more")
        return lines

    def __repr__(self) -> str:
        """One line, also in a list of results."""
        back = f" · returned: {', '.join(self.returns)}" if self.returns else ""
        return f"RunResult {self.headline()}{back} · {self.dir.name}"

    def __str__(self) -> str:
        """All that there is to say, as a terminal shows it below a cell."""
        if self.state != RunState.SUCCEEDED:
            return join(" ", ["RunResult", self.explain(traceback=False)])
        back = f" · returned: {', '.join(self.returns)}" if self.returns else ""
        where = " · rehearsal on CPU" if self.device == "CPU" else ""
        end = f"{back}{where} · {self.dir}"
        lines: list[str] = [join("", ["RunResult ", *self._what_happened(), end])]
        lines += self._missing_returns()
        lines += self.summary.lines()
        if self.collectives:
            lines.append(describe_collectives(self.collectives))
        if self.price is not None:
            lines.append(self.price.describe_cost(self.duration))
        return join("\n", lines)


def number_lines(source: Sequence[tuple[int, str]], line: int | None) -> list[str]:
    """Lines of a cell with their numbers, and a mark at the one that matters."""
    return [
        paint(f"❯ {number:>4}  {text}", Style.STRONG)
        if number == line
        else f"  {number:>4}  {text}"
        for number, text in source
    ]


def signal_name(number: int) -> str:
    """'SIGKILL' for 9; 'signal 99' for a number without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RunError(TpunbError):
    """A run did not succeed. `result` has everything that is known about it."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(result)
        self.result = result
        self.told = False
        """True if a card below the cell says everything: one line is left to be said."""

    def __str__(self) -> str:
        return self.result.explain()

    def _shown(self) -> str:
        return self.result.headline() if self.told else self.result.explain()


class RankFailedError(RunError):
    """A rank raised, crashed or was killed."""


class RunHungError(RunError):
    """No rank was active for `--hang-timeout` seconds."""


class RunTimeoutError(RunError):
    """The run took longer than `--timeout` allows."""


class RunInterruptedError(RunError):
    """The run was stopped before its end."""


_ERRORS = {
    RunState.FAILED: RankFailedError,
    RunState.HUNG: RunHungError,
    RunState.TIMED_OUT: RunTimeoutError,
    RunState.INTERRUPTED: RunInterruptedError,
}
