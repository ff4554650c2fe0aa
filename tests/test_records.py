"""What was logged, of each rank and of all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tpunb import records
from tpunb.models import RunResult


def row(rank: int, step: int | None, time: float = 0.0, **values: Any) -> records.Row:
    return {"rank": rank, "attempt": 0, "step": step, "time": time, **values}


@pytest.mark.parametrize(
    ("how", "value"), [("mean", 2.5), ("sum", 10.0), ("min", 1.0), ("max", 4.0)]
)
def test_one_value_of_many(how: str, value: float) -> None:
    assert records.reduced(how, [4.0, 1.0, 2.0, 3.0]) == value
    # A rank that has lost its numbers must be seen.
    assert math.isnan(records.reduced(how, [1.0, math.nan]))


def test_a_row_for_each_step_with_what_its_ranks_have_logged() -> None:
    rows = [
        row(0, 1, 5.0, loss=1.0, n=2, reduce={"n": "sum"}),
        row(1, 1, 6.0, loss=3.0, n=3, reduce={"n": "sum"}),
        row(1, 2, 7.0, loss=5.0),
        row(0, 2, 8.0, accuracy=0.5),
        row(0, 2, 9.0, accuracy=0.75),  # again
    ]
    assert records.of_all_ranks(rows) == [
        {"step": 1, "time": 6.0, "loss": 2.0, "n": 5.0},
        {"step": 2, "time": 9.0, "loss": 5.0, "accuracy": 0.75},
    ]


def test_calls_without_a_step_are_counted() -> None:
    rows = [row(0, None, a=1.0), row(0, None, a=2.0), row(1, None, a=3.0), row(1, None, a=4.0)]
    assert [one["a"] for one in records.of_all_ranks(rows)] == [2.0, 3.0]


def test_the_frames_of_a_run(tmp_path: Path) -> None:
    rows = [row(rank, step, 10.0 + step, loss=float(rank)) for step in (0, 1) for rank in (0, 1)]
    rows.append(row(0, 1, 12.0, tokens=4, reduce={"tokens": "sum"}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    result = RunResult("succeeded", "n", 2, "CPU", 10.0, 13.0, tmp_path)
    every, reduced = result.metrics(), result.metrics(reduced=True)
    assert list(every.columns) == ["step", "rank", "time", "loss", "tokens"]
    assert len(every) == 5
    assert list(reduced.columns) == ["step", "time", "loss", "tokens"]
    assert reduced["loss"].tolist() == [0.5, 0.5]
    assert reduced["tokens"].dropna().tolist() == [4.0]
    nothing = RunResult("succeeded", "n", 2, "CPU", 10.0, 13.0, tmp_path / "none")
    assert list(nothing.metrics(reduced=True).columns) == ["step", "time"]
