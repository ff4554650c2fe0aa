"""`RunResult`, how a run ended, with its failures, summary, causes and errors; `result.json`.

Standard library only, because the supervisor writes it. pandas and matplotlib are imported on use.
"""

from __future__ import annotations

import signal as signals
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.runs import metrics
from tpunb.runs.labels import label_runs
from tpunb.runs.metrics import Best, Curve
from tpunb.runs.spec import (
    MOST_RANKS,
    BackendName,
    Device,
    FailureKind,
    Price,
    RunSpec,
    RunState,
    Stop,
    StopCause,
    count_cores,
)
from tpunb.runs.step_times import StepTimes
from tpunb.runs.trained_models import DifferentModels
from tpunb.utils import records
from tpunb.utils.errors import TpunbError
from tpunb.utils.terminal import Printable, Style, join, paint, paint_first_line
from tpunb.utils.text import name_ranks, size

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_PROCESS_ENDS = (FailureKind.SIGNAL, FailureKind.EXIT, FailureKind.OUT_OF_MEMORY)
_OURS = (FailureKind.LOST, FailureKind.HOST_LOST, FailureKind.REFUSED)
_TYPES = {
    FailureKind.SIGNAL: "Signal",
    FailureKind.OUT_OF_MEMORY: "Signal",
    FailureKind.EXIT: "Exit",
    FailureKind.HANG: "Hang",
    FailureKind.LOST: "Lost",
    FailureKind.HOST_LOST: "Lost",
    FailureKind.REFUSED: "Refused",
}
"""The `type` of failures without an exception."""
_MOST_ATTEMPTS = 10_000
_WIDTH = 96
"""The width in characters of a diagnosis as text."""
_HEIGHT = 20
"""The most lines of a diagnosis as text."""
_LONGEST = 500
"""The most characters of a message in a headline."""


@dataclass(frozen=True)
class Failure:
    """The failure of one process of a run."""

    rank: int | None
    """The rank of the process; None for the prelude or a process of tpunb itself."""
    pid: int | None
    """The process id; None if it is not known."""
    exitcode: int | None
    """The exit code. Like `signal`, None if the run was stopped while the process was failing."""
    signal: str | None
    """The signal that ended the process, such as 'SIGKILL'; None if no signal did."""
    type: str
    """The exception's class name, or 'Signal', 'Exit', 'Hang' or 'Lost'."""
    message: str
    """The exception's message, or a description of how the process ended."""
    cell: int | None
    """The number of the cell that failed, as the notebook shows it; None if it is not known."""
    line: int | None
    """The line of the cell that failed, from 1; None if it is not known."""
    traceback: str
    """The traceback with cells and their lines instead of files, ready to print."""
    time: float
    """The time of the failure, in seconds since the epoch."""
    source: tuple[tuple[int, str], ...] = ()
    """The lines of the cell around the failed line, as (number, text)."""
    cell_id: str | None = None
    """nbformat's id of the cell; None if it has no id."""
    kind: FailureKind = FailureKind.EXCEPTION
    """The kind of failure, for programs to decide on."""
    column: int | None = None
    """The column, from 0, at which the failed expression begins; needs Python 3.11."""
    host: str | None = None
    """The name of the process's host; None for a run on one machine."""

    @classmethod
    def of(cls, kind: FailureKind, message: str, **known: Any) -> Failure:
        """Return a failure without an exception; `known`: its fields other than None, and now."""
        unknown = dict.fromkeys(("rank", "pid", "exitcode", "signal", "cell", "line"))
        fields = {**unknown, "type": _TYPES[kind], "traceback": "", "time": time.time(), **known}
        return cls(message=message, kind=kind, **fields)

    @property
    def who(self) -> str:
        """The process in words: 'rank 3', 'rank host-1/3', 'the prelude', 'the prelude on h1'."""
        if self.rank is None:
            return f"the prelude on {self.host}" if self.host else "the prelude"
        return f"rank {self.host}/{self.rank}" if self.host else f"rank {self.rank}"

    def is_like(self, other: Failure) -> bool:
        """True if `other` has the same type and failed at the same line of the same cell."""
        return (self.type, self.cell, self.line) == (other.type, other.cell, other.line)

    def headline(self) -> str:
        """Describe the failure in one line: the process, the cell and line, the error."""
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
    """All calls of one collective operation in one rank of a rehearsal."""

    rank: int
    """The rank."""
    operation: str
    """The operation: 'all_reduce sum', 'all_gather', 'rendezvous', …"""
    calls: int
    """The number of calls."""
    bytes: int
    """The number of bytes that this rank sent, in all calls. A TPU core sends as many."""
    waited: float
    """Seconds until all participants had arrived, in all calls."""
    took: float
    """Seconds from the arrival of all participants to the end, in all calls."""


def count_collectives(rows: Sequence[Collective]) -> str:
    """Return '120 collectives, 4.7 GB': the largest count and the largest volume of any rank."""
    calls = _largest_sum(rows, "calls")
    return f"{calls:,.0f} collective{'s' if calls != 1 else ''}, {_bytes_of(rows)}"


def describe_collectives(rows: Sequence[Collective]) -> str:
    """Describe the collectives of one rank, and which of these numbers hold for a TPU."""
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
    """Return the largest sum of a field over the rows of one rank."""
    sums: dict[int, float] = {}
    for row in rows:
        sums[row.rank] = sums.get(row.rank, 0) + getattr(row, name)
    return max(sums.values(), default=0)


def _bytes_of(rows: Sequence[Collective]) -> str:
    return size(int(_largest_sum(rows, "bytes")))


@dataclass(frozen=True)
class Advice:
    """A remark on a run that ended well, and what to do about it."""

    message: str
    """The observation."""
    fix: str
    """The remedy."""


@dataclass(frozen=True)
class Summary:
    """Best metrics, time per phase and advice for a finished run (`tpunb.runs.summary`)."""

    best: tuple[Best, ...] = ()
    """The best value of each metric, or the last if its name does not show which is better."""
    spent: tuple[tuple[str, float], ...] = ()
    """The phases of the run and the seconds that each took: ('prelude', 2.5), …"""
    advice: tuple[Advice, ...] = ()
    """Remarks on the run, and what to do about them."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """The values of each metric over the steps, by name."""
    chips: str = ""
    """Duty cycle and memory of the TPU chips, as text; '' if they are not known."""
    steps: StepTimes | None = None
    """The time of a mean step, from `--profile`; None without it."""
    trace: str = ""
    """The command that opens the trace of `--profile`; '' without one."""

    def lines(self) -> list[str]:
        """Return the summary as text, with a line for each part that is not empty."""
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
    """A line of a log that supports a cause, with the ranks that wrote it and the cell it names."""

    text: str
    """The line."""
    ranks: tuple[int, ...] = ()
    """The ranks that wrote the line; () if they are not known."""
    cell: int | None = None
    """The number of the cell that the line names; None if it names no cell."""

    def __str__(self) -> str:
        where = []
        if self.ranks:
            where.append(f"rank{'s' if len(self.ranks) > 1 else ''} {name_ranks(self.ranks)}")
        if self.cell is not None:
            where.append(f"cell [{self.cell}]")
        return f"{', '.join(where)}: {self.text}" if where else self.text


@dataclass(frozen=True, repr=False)
class Diagnosis(Printable):
    """A possible cause of a failure, with its evidence and fix."""

    id: str
    """The id of the rule that found it, e.g. 'hbm-oom'."""
    cause: str
    """The cause, in a sentence."""
    fix: str
    """What to do about it."""
    evidence: tuple[Evidence, ...]
    """The lines of the log that support it."""
    confidence: float
    """How certain it is, from 0 to 1, that this is the cause and not a consequence."""
    link: str
    """The address of a page about exactly this error; '' if there is none."""
    steps: tuple[str, ...] = ()
    """`fix` as a list of steps, in order."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry that `tpunb diagnose --json` prints for this cause."""
        return {
            "id": self.id,
            "cause": self.cause,
            "fix": self.fix,
            "evidence": [str(line) for line in self.evidence],
            "confidence": self.confidence,
        }

    def __str__(self) -> str:
        """Return cause, evidence, fix and link in at most 20 lines."""
        cause = [paint(line, Style.STRONG) for line in _wrap(f"{self.cause} [{self.id}]", "", 5)]
        first, *more = self._fix_lines()
        link = [paint(_shorten(f"  see {self.link}"), Style.FAINT)] if self.link else []
        rest = [paint(first, Style.STRONG, end=len("  fix:")), *more, *link]
        wrapped = (part for line in self.evidence for part in _wrap(str(line), "  | ", 2))
        evidence = [paint(line, Style.FAINT) for line in wrapped]
        return join("\n", [*cause, *evidence[: _HEIGHT - len(cause) - len(rest)], *rest])

    def _fix_lines(self) -> list[str]:
        """Return the lines of the steps, numbered if there are several."""
        steps = self.steps or (self.fix,)
        if len(steps) == 1:
            return _wrap(steps[0], "  fix: ", 8)
        lines = []
        for number, step in enumerate(steps, start=1):
            label = "  fix: " if number == 1 else " " * 7
            lines += _wrap(f"{number}. {step}", label, 8)
        return lines


class Causes(Printable, list[Diagnosis]):
    """A list of possible causes, the likeliest first."""

    def __str__(self) -> str:
        return join("\n\n", map(str, self)) or "[]"


def _wrap(text: str, label: str, most: int) -> list[str]:
    """Wrap the text into at most `most` lines, after a label."""
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
    """The result of a run: how it ended, its returned values and its metrics.

    It is the value of a train cell, and `tpunb.last_run`; `result.json` in the run folder holds
    the same data.

        result = tpunb.last_run
        result.state, result.duration      # 'succeeded', 81.4
        result.returns["model"]            # with --returns model
        result.metrics(reduced=True)       # a pandas DataFrame, a row per step
    """

    state: RunState
    """How the run ended: succeeded, failed, hung, timed_out or interrupted."""
    name: str
    """The name of the run: `--name`, or that of the notebook."""
    world_size: int
    """The number of ranks, over all hosts."""
    device: Device
    """'TPU', 'GPU', or 'CPU' for a rehearsal."""
    started: float
    """The start of the run, in seconds since the epoch."""
    ended: float
    """The end of the last process of the run, in seconds since the epoch."""
    dir: Path
    """The run folder."""
    returncode: int | None = 0
    """0 if the run succeeded, 1 if it failed, 124 if hung or timed out, 130 if interrupted."""
    attempts: int = 1
    """How often the ranks were started: 1, and more after retries (`--retries`)."""
    failures: tuple[Failure, ...] = ()
    """The failures of processes, earliest first."""
    peak_memory: tuple[int, ...] = ()
    """The peak memory of each rank in bytes; pages that ranks share count for each of them."""
    memory_limit: int = 0
    """The memory of the container or machine in bytes; 0 if it is not known."""
    collectives: tuple[Collective, ...] = ()
    """The collectives of a rehearsal, by rank and operation: their number, bytes and seconds."""
    different_models: DifferentModels | None = None
    """A model that differs between the ranks at their end, or that each trained by itself; None if
    there is none, or none that can be compared."""
    lost_records: int = 0
    """The number of records of `tpunb.log` that could not be written, as on a full disk."""
    warm: bool = False
    """True if the backend's libraries were already imported when the run began."""
    backend: BackendName = "xla"
    """What the ranks trained with: 'xla', 'torchtpu' or 'torch'."""
    replicated: bool = False
    """True if every rank ran the prelude itself."""
    replicate_reason: str = ""
    """Why every rank ran the prelude itself; '' if it ran once."""
    reason: str = ""
    """Why the run was stopped, as text; '' if it was not stopped."""
    stop: Stop | None = None
    """Why the run was stopped, as data; None if it was not stopped."""
    price: Price | None = None
    """The price of the machine, as known when the run began; None if it was not known."""
    returns: Mapping[str, Any] = field(default_factory=dict)
    """The values of `--returns` from rank 0, by name, with tensors on the CPU."""
    returns_failed: Mapping[str, str] = field(default_factory=dict)
    """The names in `--returns` without a value, and why each has none."""
    spmd: int | None = None
    """The number of cores that one rank used in torch_xla's SPMD mode; None without SPMD."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of the run, by name, as `params.*` in `tpunb.runs()`."""
    resumed_from: str | None = None
    """The run, folder or URL that `--resume` named; None without it."""
    hosts: tuple[str, ...] = ()
    """The names of the hosts in order of node rank; () for a run on the kernel's machine."""
    place: str = ""
    """The place that `--on` named; '' for the kernel's machine."""
    diagnoses: tuple[Diagnosis, ...] = ()
    """Possible causes of a failure, the likeliest first; without one, where it was raised."""
    summary: Summary = field(default_factory=Summary)
    """Best metrics, time per phase and advice."""

    @classmethod
    def of_spec(
        cls, spec: RunSpec, folder: Path, state: RunState, started: float, ended: float, **more: Any
    ) -> RunResult:
        """Return the result of a run with this spec; `more`: fields that the spec does not have."""
        fields: dict[str, Any] = {
            "spmd": spec.spmd,
            "warm": spec.warm,
            "backend": spec.backend,
            "price": spec.price,
            "resumed_from": spec.resumed_from,
            "hosts": spec.hosts,
            "place": spec.place,
        }
        return cls(
            state,
            spec.name,
            spec.world_size,
            spec.device,
            started,
            ended,
            folder,
            **{**fields, **more},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of `result.json`: without `dir`, and with names for `returns`."""
        data = asdict(replace(self, returns={}, diagnoses=(), summary=Summary()))
        del data["dir"], data["returns_failed"], data["diagnoses"], data["summary"]
        if self.stop is not None:
            data["stop"] = {"cause": self.stop.cause, "origin": self.stop.origin}
        return {**data, "returns": list(self.returns), "cost": self.cost}

    @classmethod
    def from_json(cls, data: object, folder: Path) -> RunResult:
        """Build a result from the content of `result.json`, without the values of `--returns`.

        `folder`: the run folder. Raises ValueError if `data` is not the result of a run.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("failures"), (list, tuple)):
            raise ValueError("not a RunResult")
        values = {name: data[name] for name in data if name not in ("returns", "cost")}
        values["failures"] = [records.build(Failure, each) for each in data["failures"]]
        result = records.build(cls, {**values, "dir": folder})
        plausible = 0 < result.world_size <= MOST_RANKS and result.attempts <= _MOST_ATTEMPTS
        if not plausible or result.state.active:
            raise ValueError("not the end of a run")
        return result

    @property
    def failure(self) -> Failure | None:
        """The first failure, which is the root cause of later ones; None if there is none."""
        return self.failures[0] if self.failures else None

    @property
    def value(self) -> Any:
        """What the function of `tpunb.launch` returned on rank 0: `returns["value"]`.

        Raises AttributeError if there is no such value, and says why.
        """
        if "value" in self.returns:
            return self.returns["value"]
        if "value" in self.returns_failed:
            why = f"it was not returned: {self.returns_failed['value']}"
        elif self.state != RunState.SUCCEEDED:
            why = f"the run did not succeed: {self.headline()}"
        else:
            why = "this run was not started by tpunb.launch, or its values are not loaded"
        raise AttributeError(f"this RunResult has no value: {why}")

    @property
    def duration(self) -> float:
        """Seconds from the start of the run to the end of its last process."""
        return self.ended - self.started

    @property
    def cost(self) -> float | None:
        """The cost of the machine during the run, in dollars; None if not known.

        `price` names the machine and the day on which the price was read.
        """
        return None if self.price is None else round(self.price.cost(self.duration), 4)

    def metrics(self, *, reduced: bool = False) -> pd.DataFrame:
        """Return the metrics of `tpunb.log`: a row per call and rank, in order of time.

        The columns are `step`, `rank`, `time` (seconds since the run's start), then the metrics.
        With `reduced`: a row per step, without `rank`, in which each metric is reduced over the
        ranks as `tpunb.log(reduce=…)` requested (the mean by default). A step that was repeated
        after a retry appears once. Of more than 50 MB of metrics, evenly spaced parts are read,
        with a UserWarning.
        """
        metrics.warn_if_spread(self.dir / "metrics.jsonl")
        rows = metrics.read_rows(self.dir / "metrics.jsonl")
        return metrics.to_frame(rows, self.started, reduced=reduced)

    def plot(self, *others: RunResult) -> Figure:
        """Return a matplotlib figure with a panel for each metric.

        The values are reduced over ranks and drawn by step. With `others`, each panel has a line
        for each run. Raises MissingPackageError without matplotlib, ValueError if nothing was
        logged.
        """
        from tpunb.runs.figures import panels

        runs = (self, *others)
        labels = label_runs([(run.name, run.parameters, run.dir.name) for run in runs])
        frames = {}
        for label, run in zip(labels, runs, strict=True):
            metrics.warn_if_spread(run.dir / "metrics.jsonl", metrics.DRAWN)
            rows = metrics.read_rows(run.dir / "metrics.jsonl", metrics.DRAWN)
            frames[label] = metrics.to_frame(rows, run.started, reduced=True, whole=True)
        return panels(frames)

    def raise_for_failure(self) -> None:
        """Raise an error if the run did not succeed; do nothing if it did.

        Raises RankFailedError, RunHungError, RunTimeoutError or RunInterruptedError, depending on
        `state`.
        """
        if (error := _ERRORS.get(self.state)) is not None:
            raise error(self)

    def cores(self) -> str:
        """Return '4 rehearsal cores', '8 TPU cores on 2 hosts', '4 rehearsal cores (SPMD)'."""
        cores = count_cores(self.spmd or self.world_size, self.device, len(self.hosts))
        return f"{cores} (SPMD)" if self.spmd else cores

    def explain(self, *, traceback: bool = True) -> str:
        """Describe the end of the run: what happened, where and why, the fix and the log's path.

        Without `traceback`, a line names where to find the first failure's traceback.
        """
        lines = [*self._what_happened(), *self._what_it_lacks()]
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
        """Describe the end of the run in one line."""
        if self.state == RunState.SUCCEEDED:
            return f"succeeded on {self.cores()} after {self.duration:.1f} s{self.lacks()}"
        if self.state == RunState.FAILED and self.failure is not None:
            return self.failure.headline()
        reason = f" ({self.reason})" if self.reason else ""
        return f"{_STOPPED.get(self.state, self.state)}{reason} after {self.duration:.1f} s"

    def remarks(self) -> list[str]:
        """Return lines to show below the headline: other failures, missing values, what to do."""
        lines = []
        if self.failure is not None and self.state == RunState.FAILED:
            lines += self._other_failures(self.failure)
        if self.state == RunState.HUNG:
            lines.append(f"stacks of all ranks: {self.dir / 'attempts'}")
        return [*lines, *self._what_it_lacks(), *self._how_to_continue()]

    def lacks(self) -> str:
        """Return ', but weights was not returned'; '' if nothing is missing or the run failed."""
        if self.state != RunState.SUCCEEDED:
            return ""
        lacks = []
        if self.returns_failed:
            were = "were" if len(self.returns_failed) > 1 else "was"
            lacks.append(f"{', '.join(self.returns_failed)} {were} not returned")
        if self.different_models is not None:
            alone = self.different_models.alone
            lacks.append(
                "each rank trained by itself" if alone else "the ranks trained different models"
            )
        if self.lost_records:
            lacks.append(f"{self.lost_records:,} of its metrics were not written")
        return f", but {' and '.join(lacks)}" if lacks else ""

    def _what_it_lacks(self) -> list[str]:
        if self.state != RunState.SUCCEEDED and not self.returns:  # no values are expected
            return []
        lines = [f"{name} was not returned: {why}" for name, why in self.returns_failed.items()]
        if self.different_models is not None:
            described = self.different_models.describe(
                lambda rank: name_ranks([rank], self.hosts, self.world_size)
            )
            lines += described.splitlines()
        if self.lost_records:
            lines.append(
                f"{self.lost_records:,} records of tpunb.log were not written to {self.dir}: "
                "df -h and df -i show whether its disk is full"
            )
        return lines

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
        """Describe the other failures in a line or two: equal ones first, then the next one."""
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
        """Return one line, also within a list of results."""
        back = f" · returned: {', '.join(self.returns)}" if self.returns else ""
        return f"RunResult {self.headline()}{back} · {self.dir.name}"

    def __str__(self) -> str:
        """Return the full description, as a terminal shows it below a cell."""
        if self.state != RunState.SUCCEEDED:
            return join(" ", ["RunResult", self.explain(traceback=False)])
        back = f" · returned: {', '.join(self.returns)}" if self.returns else ""
        where = " · rehearsal on CPU" if self.device == "CPU" else ""
        end = f"{back}{where} · {self.dir}"
        lines: list[str] = [join("", ["RunResult ", *self._what_happened(), end])]
        lines += self._what_it_lacks()
        lines += self.summary.lines()
        if self.collectives:
            lines.append(describe_collectives(self.collectives))
        if self.price is not None:
            lines.append(self.price.describe_cost(self.duration))
        return join("\n", lines)


def number_lines(source: Sequence[tuple[int, str]], line: int | None) -> list[str]:
    """Return the lines of a cell with their numbers, and a mark at `line`."""
    return [
        paint(f"❯ {number:>4}  {text}", Style.STRONG)
        if number == line
        else f"  {number:>4}  {text}"
        for number, text in source
    ]


def signal_name(number: int) -> str:
    """Return 'SIGKILL' for 9; 'signal 99' for a number without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RunError(TpunbError):
    """Base of the errors of runs that did not succeed. `result` is the `RunResult`."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(result)
        self.result = result
        self.told = False
        """True if a card below the cell shows everything, so that the error shows one line only."""

    def __str__(self) -> str:
        return self.result.explain()

    def _shown(self) -> str:
        return self.result.headline() if self.told else self.result.explain()


class RankFailedError(RunError):
    """A rank raised an exception, crashed or was killed."""


class RunHungError(RunError):
    """No rank was active for `--hang-timeout` seconds."""


class RunTimeoutError(RunError):
    """The run took longer than `--timeout` allows."""


class RunInterruptedError(RunError):
    """The run was stopped before it ended."""


_ERRORS = {
    RunState.FAILED: RankFailedError,
    RunState.HUNG: RunHungError,
    RunState.TIMED_OUT: RunTimeoutError,
    RunState.INTERRUPTED: RunInterruptedError,
}
