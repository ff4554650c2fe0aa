"""What `tpunb.log` recorded: the rows of `metrics.jsonl`, and their values over all ranks.

Ranks write what they have and never wait for each other; readers reduce. Standard library only:
pandas is imported by `to_frame`.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from tpunb.runs.events import Metric
from tpunb.utils import files, records
from tpunb.utils.text import size

if TYPE_CHECKING:
    import pandas as pd

RESERVED = ("rank", "attempt", "step", "time", "reduce")
"""What a row holds beside the metrics."""
_NUMBERS = ("rank", "time")
"""What of it no row is without."""
MEAN = "mean"
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    MEAN: lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
}
"""How the values of several ranks become one."""
SPEED, FLOPS = "samples_per_second", "flops_per_sample"
"""Metrics with these names were measured by `tpunb.training.Throughput`."""
Row = dict[str, Any]

_LESS = frozenset(
    "loss losses error err perplexity ppl mse mae rmse nll bpc wer cer fid divergence".split()
)
_MORE = frozenset(
    "acc accuracy auc auroc f1 precision recall score iou miou dice bleu rouge map mcc r2 psnr "
    "ssim reward return top1 top5".split()
)
"""Words in the names of metrics of which less is better, or more."""


def reduce_ranks(how: str, values: Iterable[float]) -> float:
    """One value from those of several ranks; NaN if one of them is NaN."""
    known = list(values)
    return math.nan if any(map(math.isnan, known)) else REDUCTIONS[how](known)


def parse_row(line: str) -> Row | None:
    """A line of `metrics.jsonl`; None for one that a full disk or a crash has left."""
    try:
        row = records.parse(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not all(map(records.is_number, map(row.get, _NUMBERS))):
        return None
    step, reduce = row.get("step"), row.get("reduce", {})
    if step is not None and not records.is_number(step):
        return None
    if not isinstance(reduce, dict) or not all(how in REDUCTIONS for how in reduce.values()):
        return None
    if not records.is_number(row.get("attempt", 0)):
        return None
    # A float may be infinite, or no number.
    values: Iterable[Any] = values_of(row).values()
    return row if all(isinstance(v, float) or records.is_number(v) for v in values) else None


MOST = 50_000_000
"""Bytes of metrics that are read of a run: in about 5 s, and with half a gigabyte of memory."""


DRAWN = 20_000_000
"""Bytes of them for a figure, which has fewer points than they have rows."""


def warn_if_spread(path: Path, most: int = MOST) -> None:
    """Warn that of this file only parts are read."""
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
    """The rows of a file, in their order; lines that are none are left out. Of a file that has more
    than `most` bytes, those of parts at equal distances.

    After a retry a step counts once: what earlier attempts recorded from the first step of a
    later attempt on is left out.
    """
    try:
        rows = [
            row for line in files.read_spread(path, most) if (row := parse_row(line)) is not None
        ]
    except (FileNotFoundError, PermissionError):
        rows = []
    began: dict[int, int] = {}
    for row in rows:
        if (step := row.get("step")) is not None:
            attempt = row.get("attempt", 0)
            began[attempt] = min(step, began.get(attempt, step))
    return [row for row in rows if not _is_repeated(row, began)]


def _is_repeated(row: Row, began: Mapping[int, int]) -> bool:
    step, attempt = row.get("step"), row.get("attempt", 0)
    return step is not None and any(
        attempt < later and step >= first for later, first in began.items()
    )


def to_event(row: Row) -> Metric:
    """A row as the event that a follower of the run gets."""
    return Metric(
        row["rank"],
        row.get("step"),
        values_of(row),
        row.get("reduce", {}),
        row["time"],
        row.get("attempt", 0),
    )


def values_of(row: Row) -> dict[str, float]:
    """The metrics of a row, by name."""
    return {name: value for name, value in row.items() if name not in RESERVED}


def reduce_rows(rows: Iterable[Row], *, whole: bool = False) -> list[Row]:
    """A row for each step: its metrics reduced over the ranks that logged them.

    Calls without a step are matched by their number among such calls of a rank. If a rank logs
    a metric of a step twice, the last value counts. `time` is the latest.

    `whole`: leave out a metric's steps that only some of its ranks have logged, as when a run is
    stopped: the mean of some ranks is no better than that of all. (But where ranks log steps of
    their own, every step counts.)
    """
    steps: dict[tuple[Any, int], Row] = {}
    values: dict[tuple[Any, int], dict[str, dict[int, float]]] = {}
    how: dict[str, str] = {}
    calls: dict[int, int] = {}
    for row in rows:
        rank, step = row["rank"], row.get("step")
        if step is None:
            calls[rank] = calls.get(rank, 0) + 1
        key = (step, 0) if step is not None else (None, calls[rank])
        reduced = steps.setdefault(key, {"step": step, "time": row["time"]})
        reduced["time"] = max(reduced["time"], row["time"])
        how.update(row.get("reduce", {}))
        for name, value in values_of(row).items():
            values.setdefault(key, {}).setdefault(name, {})[rank] = value
    if whole:
        _keep_whole(values)
    for key, reduced in steps.items():
        for name, by_rank in values.get(key, {}).items():
            reduced[name] = reduce_ranks(how.get(name, MEAN), by_rank.values())
    return list(steps.values())


def _keep_whole(values: Mapping[Any, dict[str, dict[int, float]]]) -> None:
    """Drop each metric's values at steps that not all of its ranks have logged, if any has."""
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
    """The rows as a frame in order of time, in seconds since `started`.

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
    """The best value of a metric that a run has logged, or its last."""

    name: str
    value: float
    step: int | None
    last: bool = False
    """True if the metric's name does not say which value is better."""

    def __str__(self) -> str:
        """'best loss 0.1234 (step 40)', 'last lr 0.001'."""
        step = "" if self.step is None or self.last else f" (step {self.step:,})"
        return f"{'last' if self.last else 'best'} {self.name} {self.value:.4g}{step}"


def comparison(name: str) -> Callable[[float, float], bool] | None:
    """True for (a, b) if a is the better value of a metric; None if its name does not tell."""
    words = set(re.findall(r"[a-z]+[0-9]*", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))
    if bool(words & _LESS) == bool(words & _MORE):
        return None
    return float.__lt__ if words & _LESS else float.__gt__


def best_values(rows: Iterable[Row]) -> list[Best]:
    """The best value of each metric, in the order in which they came.

    `rows`: a row a step, as `reduce_rows` gives them.
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
"""Step and value of a metric, in order; without steps, the number of the call."""


def curves(rows: Iterable[Row], most: int) -> dict[str, Curve]:
    """The course of each metric in at most this many points, by name; the last is not averaged.

    `rows`: a row a step, as `reduce_rows` gives them.
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
    """At most this many points: each is the mean of equally many, at the last one's step."""
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
    """When its first rank logged it, in seconds since the epoch."""


SETTLED = 5.0
"""Seconds after which ranks that have not logged a step are taken not to log it."""
HELD = 80
"""Steps that wait for them at most: ranks write many at once where steps are short."""
MOST_PENDING = 1_000


@dataclass
class _Pending:
    """A step of a metric that only some ranks have logged."""

    time: float
    since: float
    by_rank: dict[int, float] = field(default_factory=dict)


class MetricSeries:
    """Each metric's values by step, reduced over ranks, while the ranks log them.

    A step is complete when all ranks have logged it, or all that log this metric: often rank 0
    alone does, which shows after SETTLED seconds or HELD steps. When an attempt begins anew, the
    steps of the attempt before it are dropped from its first step on. Calls without a step are
    numbered. Without `keep` complete steps are handed out and forgotten.
    """

    def __init__(
        self, world_size: int, *, keep: bool = True, clock: Callable[[], float] = monotonic
    ) -> None:
        self.attempt = 0
        self._world_size = world_size
        self._keep = keep
        self._clock = clock
        self._complete: dict[str, dict[int, float]] = {}
        """By name and step."""
        self._pending: dict[str, dict[int, _Pending]] = {}
        self._ranks: dict[str, set[int]] = {}
        """Those that have logged the metric."""
        self._known: set[str] = set()
        """Metrics of which it is known that no other ranks log them."""
        self._newest: dict[str, int] = {}
        """The highest complete step."""
        self._how: dict[str, str] = {}
        self._calls: dict[tuple[str, int], int] = {}
        """Without a step, by name and rank."""

    def add(self, metric: Metric) -> list[Point]:
        """Take what a rank has logged; returns the steps that this makes complete."""
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
            point = pending.setdefault(step, _Pending(metric.time, self._clock()))
            point.by_rank[metric.rank] = value
            points += self._look(name, step)
        return points

    def _look(self, name: str, step: int) -> list[Point]:
        """What is complete now that a rank has logged this step."""
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
            else:  # a rank came to it after it was complete
                del pending[oldest]
        return points

    def _learn(self, name: str, step: int) -> list[Point]:
        """Others had time to log this step: if those that log the metric have, it is complete."""
        if not self._is_known(name, step):
            return []
        self._known.add(name)
        return self._close_known(name, [*self._pending[name]])

    def _is_known(self, name: str, step: int) -> bool:
        return self._pending[name][step].by_rank.keys() >= self._ranks[name]

    def _close_known(self, name: str, steps: Iterable[int]) -> list[Point]:
        return [self._close(name, step) for step in steps if self._is_known(name, step)]

    def settle(self, since: float) -> list[Point]:
        """Complete the steps that no other rank has logged since this time of the clock."""
        points = []
        for name, pending in self._pending.items():
            waiting = next((step for step in pending if pending[step].since <= since), None)
            if waiting is not None:
                points += self._learn(name, waiting)
        return points

    def finish(self, *, whole: bool = False) -> list[Point]:
        """No more values come: the rest. `whole`: as in `reduce_rows`."""
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

    def _reduce(self, name: str, point: _Pending) -> float:
        return reduce_ranks(self._how.get(name, MEAN), point.by_rank.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics, in the order in which they came."""
        return tuple(self._complete)

    def values(self, name: str) -> list[tuple[int, float]]:
        """Step and value of the complete steps, in order; while there are none, of the others."""
        if complete := self._complete[name]:
            return sorted(complete.items())
        return sorted((s, self._reduce(name, point)) for s, point in self._pending[name].items())
