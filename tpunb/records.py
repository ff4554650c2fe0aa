"""What `tpunb.log` has recorded: the rows of a run's `metrics.jsonl`, and one value for all ranks.

Ranks write what they have and never wait for each other; whoever reads reduces. Standard library
only: pandas is imported by who asks for a frame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

RESERVED = ("rank", "attempt", "step", "time", "reduce")
"""What a row holds beside the metrics."""
MEAN = "mean"
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    MEAN: lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
}
"""How one value is made of those of several ranks."""
SPEED, FLOPS = "samples_per_second", "flops_per_sample"
"""Metrics with these names are what `tpunb.training.Throughput` has measured."""
Row = dict[str, Any]


def reduced(how: str, values: Iterable[float]) -> float:
    """One value of those of several ranks; not a number if one of them is none."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else REDUCTIONS[how](found)


def read(path: Path) -> list[Row]:
    """The rows of a file, in their order; a line that was cut off is left out.

    After a retry a step counts once: what earlier attempts recorded of the steps that a later
    one began with, or came to again, is left out.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows: list[Row] = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    began: dict[int, int] = {}
    for row in rows:
        if (step := row.get("step")) is not None:
            attempt = row.get("attempt", 0)
            began[attempt] = min(step, began.get(attempt, step))
    return [row for row in rows if not _again(row, began)]


def _again(row: Row, began: Mapping[int, int]) -> bool:
    step, attempt = row.get("step"), row.get("attempt", 0)
    return step is not None and any(
        attempt < later and step >= first for later, first in began.items()
    )


def metrics_of(row: Row) -> dict[str, float]:
    """The metrics of a row, by name."""
    return {name: value for name, value in row.items() if name not in RESERVED}


def of_all_ranks(rows: Iterable[Row]) -> list[Row]:
    """A row for each step: its metrics reduced over the ranks that have logged them.

    What was logged without a step is put together by its number among such calls of its rank.
    A rank that logs a metric of a step twice counts with the last. `time` is the latest.
    """
    found: dict[tuple[Any, int], Row] = {}
    values: dict[tuple[Any, int], dict[str, dict[int, float]]] = {}
    how: dict[str, str] = {}
    calls: dict[int, int] = {}
    for row in rows:
        rank, step = row["rank"], row.get("step")
        if step is None:
            calls[rank] = calls.get(rank, 0) + 1
        key = (step, 0) if step is not None else (None, calls[rank])
        one = found.setdefault(key, {"step": step, "time": row["time"]})
        one["time"] = max(one["time"], row["time"])
        how.update(row.get("reduce", {}))
        for name, value in metrics_of(row).items():
            values.setdefault(key, {}).setdefault(name, {})[rank] = value
    for key, one in found.items():
        for name, by_rank in values[key].items():
            one[name] = reduced(how.get(name, MEAN), by_rank.values())
    return list(found.values())


def frame(rows: Sequence[Row], started: float, *, reduced: bool = False) -> pd.DataFrame:
    """The rows as a frame in order of time, which counts from `started`, in seconds.

    `reduced`: a row for each step, without `rank` (see `of_all_ranks`).
    """
    import pandas as pd

    if reduced:
        rows = of_all_ranks(rows)
    first = ["step", "time"] if reduced else ["step", "rank", "time"]
    made = pd.DataFrame([{"step": None, **row} for row in rows], columns=None if rows else first)
    made = made.drop(columns=["attempt", "reduce"], errors="ignore")
    made["time"] = made["time"] - started
    made = made.sort_values("time", kind="stable", ignore_index=True)
    return made[first + [name for name in made.columns if name not in first]]
