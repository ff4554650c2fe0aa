"""The metrics of `tpunb.log`: the rows of `metrics.jsonl`, and their values over all ranks.

Ranks write their own values and never wait for each other; readers reduce them. Standard library
only; `to_frame` imports pandas.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from tpunb.runs.events import Metric
from tpunb.utils import files, records
from tpunb.utils.text import number, size

if TYPE_CHECKING:
    import pandas as pd

RESERVED = ("rank", "attempt", "step", "time", "reduce")
"""The fields of a row that are not metrics."""
_NUMBERS = ("rank", "time")
"""The reserved fields that every row must have."""
MEAN = "mean"
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    MEAN: lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
}
"""The functions that reduce the values of several ranks to one, by name."""
SPEED, FLOPS = "samples_per_second", "flops_per_sample"
"""Names of the metrics that `tpunb.training.Throughput` logs."""
Row = dict[str, Any]

_LESS = frozenset(
    "loss losses error err perplexity ppl mse mae rmse nll bpc wer cer fid divergence".split()
)
_MORE = frozenset(
    "acc accuracy auc auroc f1 precision recall score iou miou dice bleu rouge map mcc r2 psnr "
    "ssim reward return top1 top5".split()
)
"""Words in the names of metrics for which lower values are better (_LESS), or higher (_MORE)."""


def reduce_ranks(how: str, values: Iterable[float]) -> float:
    """Reduce the values of several ranks to one; NaN if any of them is NaN."""
    known = list(values)
    if len(known) == 1 and how == MEAN:
        return float(known[0])
    return math.nan if any(map(math.isnan, known)) else REDUCTIONS[how](known)


def parse_row(line: str) -> Row | None:
    """Parse a line of `metrics.jsonl`; None if a full disk or a crash has damaged it."""
    try:
        return _checked(records.parse(line))
    except ValueError:
        return None


def _parse_rows(lines: Iterator[str]) -> Iterator[Row]:
    """Yield the rows of lines, many of which are parsed at once, without damaged lines."""
    while some := [*itertools.islice(lines, 1000)]:
        try:
            rows = records.parse(f"[{','.join(some)}]")
        except ValueError:
            rows = []
        found = map(_checked, rows) if len(rows) == len(some) else map(parse_row, some)
        yield from (row for row in found if row is not None)


def _checked(row: Any) -> Row | None:
    if not isinstance(row, dict) or not all(map(records.is_number, map(row.get, _NUMBERS))):
        return None
    step, reduce = row.get("step"), row.get("reduce", {})
    if step is not None and not records.is_number(step):
        return None
    if not isinstance(reduce, dict) or not all(how in REDUCTIONS for how in reduce.values()):
        return None
    if not records.is_number(row.get("attempt", 0)):
        return None
    for name, value in row.items():  # a float may be infinite or NaN
        if type(value) is not float and name not in RESERVED and not records.is_number(value):
            return None
    return row


MOST = 50_000_000
"""The most bytes of metrics that are read: this takes about 5 s and half a gigabyte of memory."""


DRAWN = 20_000_000
"""The most bytes that are read for a figure, which has fewer points than they have rows."""


def warn_if_spread(path: Path, most: int = MOST) -> None:
    """Warn if a file is so large that only parts of it are read."""
    try:
        length = path.lstat().st_size
    except OSError:
        return
    if length > most:
        warnings.warn(
            f"{path} has {size(length)}: {size(most)} of it are read, in parts at equal distances",
            stacklevel=3,
        )


def read_rows(path: Path, most: int = MOST) -> list[Row]:
    """Read the rows of a file in order, without damaged lines.

    Of a file larger than `most` bytes, evenly spaced parts are read. A step that was repeated
    after a retry counts once: rows of earlier attempts from the first step of a later attempt on
    are left out.
    """
    try:
        rows = [*_parse_rows(files.read_spread(path, most))]
    except (FileNotFoundError, PermissionError):
        rows = []
    began: dict[int, int] = {}
    for row in rows:
        if (step := row.get("step")) is not None:
            attempt = row.get("attempt", 0)
            began[attempt] = min(step, began.get(attempt, step))
    return [row for row in rows if not _is_repeated(row, began)] if len(began) > 1 else rows


def _is_repeated(row: Row, began: Mapping[int, int]) -> bool:
    step, attempt = row.get("step"), row.get("attempt", 0)
    return step is not None and any(
        attempt < later and step >= first for later, first in began.items()
    )


def to_event(row: Row) -> Metric:
    """Convert a row to the event that a follower of the run yields."""
    return Metric(
        row["rank"],
        row.get("step"),
        values_of(row),
        row.get("reduce", {}),
        row["time"],
        row.get("attempt", 0),
    )


def values_of(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in RESERVED}


def reduce_rows(rows: Iterable[Row], *, whole: bool = False) -> list[Row]:
    """Return a row for each step, with its metrics reduced over the ranks that logged them.

    Calls without a step are matched by their number among such calls of a rank. If a rank logs
    a metric twice in a step, the last value counts. `time` is the latest of the ranks.

    `whole`: leave out values of a metric at steps that only some of its ranks have logged, as when
    a run is stopped: the mean over some ranks cannot be compared with that over all. (If the ranks
    never log the same step, every step counts.)
    """
    steps: dict[tuple[Any, int], Row] = {}
    values: dict[tuple[Any, int], dict[str, dict[int, float]]] = {}
    how: dict[str, str] = {}
    calls: dict[int, int] = {}
    ranks: set[int] = set()
    for row in rows:
        rank, step = row["rank"], row.get("step")
        ranks.add(rank)
        if step is None:
            calls[rank] = calls.get(rank, 0) + 1
        key = (step, 0) if step is not None else (None, calls[rank])
        reduced = steps.setdefault(key, {"step": step, "time": row["time"]})
        reduced["time"] = max(reduced["time"], row["time"])
        how.update(row.get("reduce", {}))
        of_step = values.setdefault(key, {})
        for name, value in row.items():
            if name in of_step:
                of_step[name][rank] = value
            elif name not in RESERVED:
                of_step[name] = {rank: value}
    if whole and len(ranks) > 1:
        _keep_whole(values)
    for key, reduced in steps.items():
        for name, by_rank in values[key].items():
            reduced[name] = reduce_ranks(how.get(name, MEAN), by_rank.values())
    return list(steps.values())


def _keep_whole(values: Mapping[Any, dict[str, dict[int, float]]]) -> None:
    """Drop a metric's values at steps that only some of its ranks logged, if all share any step."""
    together: dict[str, int] = {}
    every: dict[str, set[int]] = {}
    for of_step in values.values():
        for name, by_rank in of_step.items():
            every.setdefault(name, set()).update(by_rank)
            together[name] = max(together.get(name, 0), len(by_rank))
    for of_step in values.values():
        for name in [*of_step]:
            if len(of_step[name]) < len(every[name]) == together[name]:
                del of_step[name]


def to_frame(
    rows: Sequence[Row], started: float, *, reduced: bool = False, whole: bool = False
) -> pd.DataFrame:
    """Return the rows as a frame in order of time, with `time` in seconds since `started`.

    `reduced`: a row for each step, without `rank`; `whole`: see `reduce_rows`.
    """
    import pandas as pd

    if reduced:
        rows = reduce_rows(rows, whole=whole)
    first = ["step", "time"] if reduced else ["step", "rank", "time"]
    frame = pd.DataFrame([{"step": None, **row} for row in rows], columns=None if rows else first)
    frame = frame.drop(columns=["attempt", "reduce"], errors="ignore")
    frame["time"] = frame["time"] - started
    frame = frame.sort_values("time", kind="stable", ignore_index=True)
    return frame[first + [name for name in frame.columns if name not in first]]


@dataclass(frozen=True)
class Best:
    """The best value of a metric in a run, or its last value."""

    name: str
    """The metric's name."""
    value: float
    """The value, reduced over ranks."""
    step: int | None
    """The step of the value; None if it was logged without a step."""
    last: bool = False
    """True for the last value, because the metric's name does not show which value is better."""

    def __str__(self) -> str:
        """Return 'best loss 0.1234 (step 40)', 'last lr 0.001'."""
        step = "" if self.step is None or self.last else f" (step {self.step:,})"
        return f"{'last' if self.last else 'best'} {self.name} {number(self.value)}{step}"


def comparison(name: str) -> Callable[[float, float], bool] | None:
    """Return a function that is True for (a, b) if a is better; None if the name does not show."""
    words = set(re.findall(r"[a-z]+[0-9]*", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))
    if bool(words & _LESS) == bool(words & _MORE):
        return None
    return float.__lt__ if words & _LESS else float.__gt__


def best_values(rows: Iterable[Row]) -> list[Best]:
    """Return the best value of each metric, in the order in which they were first logged.

    `rows`: a row per step, as `reduce_rows` returns them.
    """
    best: dict[str, Best] = {}
    for row in rows:
        for name, value in values_of(row).items():
            if math.isnan(value):
                continue
            is_better = comparison(name)
            if name not in best or is_better is None or is_better(value, best[name].value):
                best[name] = Best(name, float(value), row.get("step"), is_better is None)
    return list(best.values())


Curve = tuple[tuple[float, float], ...]
"""Pairs of step (or number of the call, without steps) and value of a metric, in order."""


def curves(rows: Iterable[Row], most: int) -> dict[str, Curve]:
    """Return the curve of each metric in at most `most` points; the last point is not averaged.

    `rows`: a row per step, as `reduce_rows` returns them.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in values_of(row).items():
            points = found.setdefault(name, [])
            points.append((len(points) if row["step"] is None else row["step"], value))
    return {
        name: (*thin_out(sorted(points), most)[:-1], max(points)) for name, points in found.items()
    }


def thin_out(points: Sequence[tuple[float, float]], most: int) -> Curve:
    """Return at most `most` points, each the mean of a group at the step of its last point."""
    each = max(1, math.ceil(len(points) / most))
    parts = (points[i : i + each] for i in range(0, len(points), each))
    return tuple((part[-1][0], sum(y for _, y in part) / len(part)) for part in parts)


@dataclass(frozen=True)
class Point:
    """A metric's value at a step, reduced over ranks."""

    name: str
    step: int
    value: float
    time: float
    """The time when the first rank logged it, in seconds since the epoch."""


SETTLED = 5.0
"""Seconds after which ranks that have not logged a step are assumed not to log it."""
HELD = 80
"""The most steps that wait for such ranks: with short steps, ranks write many at once."""
MOST_PENDING = 1_000


@dataclass
class _PendingStep:
    """A step of a metric that only some ranks have logged."""

    time: float
    since: float
    by_rank: dict[int, float] = field(default_factory=dict)


class MetricSeries:
    """Reduces each metric's values by step over ranks, while the ranks log them.

    A step is complete when all ranks that log this metric have logged it. Often only rank 0 logs a
    metric, which is known after SETTLED seconds or HELD steps. When a new attempt begins, the steps
    of the earlier attempt are dropped from the new attempt's first step on. Calls without a step
    are numbered. Without `keep`, complete steps are returned and forgotten.
    """

    def __init__(
        self, world_size: int, *, keep: bool = True, clock: Callable[[], float] = monotonic
    ) -> None:
        self.attempt = 0
        self._world_size = world_size
        self._keep = keep
        self._clock = clock
        self._complete: dict[str, dict[int, float]] = {}
        """Values by name and step."""
        self._pending: dict[str, dict[int, _PendingStep]] = {}
        self._ranks: dict[str, set[int]] = {}
        """The ranks that have logged each metric."""
        self._known: set[str] = set()
        """Metrics that are known not to be logged by further ranks."""
        self._newest: dict[str, int] = {}
        """The highest complete step of each metric."""
        self._how: dict[str, str] = {}
        self._calls: dict[tuple[str, int], int] = {}
        """The number of calls without a step, by name and rank."""

    def add(self, metric: Metric) -> list[Point]:
        """Take a metric that a rank has logged; return the steps that are complete now."""
        if metric.attempt < self.attempt:
            return []
        if metric.attempt > self.attempt:
            self.attempt = metric.attempt
            if metric.step is not None:
                self._drop_from(metric.step)
        self._how.update(metric.reduce)
        points = []
        for name, value in metric.values.items():
            step = metric.step
            if step is None:
                step = self._calls.get((name, metric.rank), 0)
                self._calls[name, metric.rank] = step + 1
            self._ranks.setdefault(name, set()).add(metric.rank)
            self._complete.setdefault(name, {})
            pending = self._pending.setdefault(name, {})
            point = pending.setdefault(step, _PendingStep(metric.time, self._clock()))
            point.by_rank[metric.rank] = value
            points += self._look(name, step)
        return points

    def _look(self, name: str, step: int) -> list[Point]:
        """Return the points that are complete now that a rank has logged this step."""
        pending = self._pending[name]
        if len(pending[step].by_rank) == self._world_size:
            return [self._close(name, step)]
        if name in self._known:
            points = self._close_known(name, [step])
        elif len(pending) > HELD:
            points = self._learn(name, next(iter(pending)))
        else:
            return []
        if len(pending) > MOST_PENDING:
            oldest = next(iter(pending))
            if oldest > self._newest.get(name, -1):  # ranks log steps of their own
                points.append(self._close(name, oldest))
            else:  # a rank logged it after it was complete
                del pending[oldest]
        return points

    def _learn(self, name: str, step: int) -> list[Point]:
        """Complete a step that other ranks have had time to log, if all known ranks have."""
        if not self._is_known(name, step):
            return []
        self._known.add(name)
        return self._close_known(name, [*self._pending[name]])

    def _is_known(self, name: str, step: int) -> bool:
        return self._pending[name][step].by_rank.keys() >= self._ranks[name]

    def _close_known(self, name: str, steps: Iterable[int]) -> list[Point]:
        return [self._close(name, step) for step in steps if self._is_known(name, step)]

    def settle(self, since: float) -> list[Point]:
        """Complete steps that have been pending since this time of the clock or longer."""
        points = []
        for name, pending in self._pending.items():
            waiting = next((step for step in pending if pending[step].since <= since), None)
            if waiting is not None:
                points += self._learn(name, waiting)
        return points

    def finish(self, *, whole: bool = False) -> list[Point]:
        """Return the remaining points at the end. `whole`: as in `reduce_rows`."""
        points = []
        for name, pending in self._pending.items():
            points += self._close_known(name, [*pending])
            if not whole or name not in self._newest:
                points += [self._close(name, step) for step in [*pending]]
        return points

    def _close(self, name: str, step: int) -> Point:
        point = self._pending[name].pop(step)
        value = self._reduce(name, point)
        if self._keep:
            self._complete[name][step] = value
        self._newest[name] = max(step, self._newest.get(name, step))
        return Point(name, step, value, point.time)

    def _drop_from(self, step: int) -> None:
        every: list[dict[int, Any]] = [*self._complete.values(), *self._pending.values()]
        for steps in every:
            for late in [other for other in steps if other >= step]:
                del steps[late]
        self._newest = {name: min(step - 1, last) for name, last in self._newest.items()}

    def _reduce(self, name: str, point: _PendingStep) -> float:
        return reduce_ranks(self._how.get(name, MEAN), point.by_rank.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics, in the order in which they were first logged."""
        return tuple(self._complete)

    def values(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of the complete steps in order; without any, of pending steps."""
        if complete := self._complete[name]:
            return sorted(complete.items())
        return sorted((s, self._reduce(name, point)) for s, point in self._pending[name].items())
