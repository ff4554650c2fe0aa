"""Logged metrics, by rank and reduced over ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tpunb.runs import metrics
from tpunb.runs.events import Metric
from tpunb.runs.metrics import MetricSeries
from tpunb.runs.result import RunResult


def row(rank: int, step: int | None, time: float = 0.0, **values: Any) -> metrics.Row:
    return {"rank": rank, "attempt": 0, "step": step, "time": time, **values}


@pytest.mark.parametrize(
    ("how", "value"), [("mean", 2.5), ("sum", 10.0), ("min", 1.0), ("max", 4.0)]
)
def test_metric_reduction_over_ranks(how: str, value: float) -> None:
    assert metrics.reduce_ranks(how, [4.0, 1.0, 2.0, 3.0]) == value
    # A rank that has lost its numbers must be seen.
    assert math.isnan(metrics.reduce_ranks(how, [1.0, math.nan]))


def test_a_row_for_each_step_with_what_its_ranks_have_logged() -> None:
    rows = [
        row(0, 1, 5.0, loss=1.0, n=2, reduce={"n": "sum"}),
        row(1, 1, 6.0, loss=3.0, n=3, reduce={"n": "sum"}),
        row(1, 2, 7.0, loss=5.0),
        row(0, 2, 8.0, accuracy=0.5),
        row(0, 2, 9.0, accuracy=0.75),  # again
    ]
    assert metrics.reduce_rows(rows) == [
        {"step": 1, "time": 6.0, "loss": 2.0, "n": 5.0},
        {"step": 2, "time": 9.0, "loss": 5.0, "accuracy": 0.75},
    ]


def test_best_value_ignores_steps_that_only_some_ranks_logged() -> None:
    rows = [row(rank, step, loss=1.0 + rank) for step in (1, 2) for rank in range(4)]
    rows += [row(0, step, lr=0.5, accuracy=step / 10) for step in (1, 2, 3)]  # rank 0 alone logs it
    rows.append(row(1, 2, accuracy=0.9))  # rank 1 only evaluates now and then
    rows += [row(0, 3, loss=0.1), row(1, 3, loss=0.2)]  # the run was stopped
    whole = metrics.reduce_rows(rows, whole=True)
    assert [one.get("loss") for one in whole] == [2.5, 2.5, None]
    assert [str(best) for best in metrics.best_values(whole)] == [
        "best loss 2.5 (step 1)",
        "last lr 0.5",
        "best accuracy 0.55 (step 2)",
    ]


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


@pytest.mark.parametrize(
    ("name", "less"),
    [
        ("loss", True),
        ("val_loss", True),
        ("accuracy", False),
        ("top5", False),
        ("lr", None),
        ("step_time", None),
        ("glossy", None),
    ],
)
def test_comparison__direction_is_derived_from_the_metric_name(
    name: str, less: bool | None
) -> None:
    better = metrics.comparison(name)
    assert (None if better is None else better(1.0, 2.0)) is less


def test_best_values__of_each_metric_or_the_last() -> None:
    rows = [
        {"step": 1, "time": 1.0, "loss": 2.0, "lr": 0.1},
        {"step": 2, "time": 2.0, "loss": 0.5, "accuracy": 0.25},
        {"step": 3, "time": 3.0, "loss": math.nan, "accuracy": 0.75, "lr": 0.01},
        {"step": None, "time": 4.0, "accuracy": 0.5, "loss": 0.5},
    ]
    assert [str(best) for best in metrics.best_values(rows)] == [
        "best loss 0.5 (step 2)",
        "last lr 0.01",
        "best accuracy 0.75 (step 3)",
    ]
    assert metrics.best_values([{"step": 1, "loss": math.nan}]) == []


def both(ranks: int, logged: list[Metric]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that the chart draws, and those of the calls' records, by name."""
    series = MetricSeries(ranks)
    for metric in logged:
        series.add(metric)
    rows = metrics.reduce_rows(_kept(logged))
    drawn = {name: series.values(name) for name in series.names}
    said = {name: sorted((row["step"], row[name]) for row in rows if name in row) for name in drawn}
    return drawn, said


def _kept(logged: list[Metric]) -> list[metrics.Row]:
    last = max(metric.attempt for metric in logged)
    first = min(m.step for m in logged if m.attempt == last and m.step is not None)
    return [
        {"rank": m.rank, "step": m.step, "time": m.time, "reduce": dict(m.reduce), **m.values}
        for m in logged
        if m.attempt == last or (m.step is not None and m.step < first)
    ]


def test_series__each_metric_is_reduced_as_its_ranks_have_asked() -> None:
    how = {"tokens": "sum", "worst": "max", "best": "min"}
    logged = [
        Metric(rank, step, dict.fromkeys(("loss", *how), step + 10.0**rank), how)
        for step in (3, 1, 2)
        for rank in range(3)
    ]
    drawn, said = both(3, logged)
    assert drawn == said
    assert drawn["tokens"] == [(1, 114.0), (2, 117.0), (3, 120.0)]
    assert [value for _, value in drawn["worst"]] == [101.0, 102.0, 103.0]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def points(found: list[metrics.Point]) -> list[tuple[str, int, float]]:
    return [(point.name, point.step, point.value) for point in found]


def test_series__a_step_is_complete_when_all_ranks_have_logged_it() -> None:
    series = MetricSeries(2)
    for step in (1, 2):
        assert series.add(Metric(0, step, {"loss": 1.0})) == []
    assert points(series.add(Metric(1, 1, {"loss": 2.0}))) == [("loss", 1, 1.5)]
    assert series.values("loss") == [(1, 1.5)]
    assert series.finish(whole=True) == []
    assert points(series.finish()) == [("loss", 2, 1.0)]


def test_series__values_of_rank_0_alone_appear_after_a_wait() -> None:
    clock = Clock()
    series = MetricSeries(4, clock=clock)
    assert series.add(Metric(0, 1, {"lr": 0.5})) == []
    clock.now += 2
    assert series.add(Metric(0, 2, {"lr": 0.4})) == []
    assert series.settle(clock.now - 3) == []
    assert points(series.settle(clock.now - 2)) == [("lr", 1, 0.5), ("lr", 2, 0.4)]
    assert points(series.add(Metric(0, 3, {"lr": 0.3}))) == [("lr", 3, 0.3)]
    # Then rank 1 logs it as well: from now on both are waited for.
    assert series.add(Metric(1, 4, {"lr": 0.1})) == []
    assert points(series.add(Metric(0, 4, {"lr": 0.3}))) == [("lr", 4, 0.2)]


def test_series__ranks_that_log_steps_of_their_own_lose_none() -> None:
    series = MetricSeries(2, keep=False)
    count = 3 * metrics.MOST_PENDING
    found = [each for s in range(count) for each in series.add(Metric(s % 2, s, {"a": float(s)}))]
    assert len(found) > metrics.MOST_PENDING
    found += series.finish()
    assert sorted(point.step for point in found) == list(range(count))


def test_series__another_attempt_begins_anew_where_it_begins() -> None:
    logged = [Metric(0, step, {"loss": 1.0}) for step in range(5)]
    logged += [Metric(0, step, {"loss": 9.0}, attempt=1) for step in (3, 4)]
    for ranks in (1, 2):  # all have logged a step, or only some
        drawn, said = both(ranks, logged)
        assert drawn == said
        assert drawn["loss"] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)]


def test_of_many_rows_parts_are_read_and_curves_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in range(2_000):
            for rank in range(4):
                made = {"rank": rank, "step": step, "time": step * 0.1, "loss": step + rank}
                file.write(json.dumps(made) + "\n")
    every = metrics.reduce_rows(metrics.read_rows(path), whole=True)
    assert len(every) == 2_000
    rows = metrics.read_rows(path, most=path.stat().st_size // 5)
    assert len(rows) < 2_000
    steps = metrics.reduce_rows(rows, whole=True)
    known = {row["step"]: row["loss"] for row in every}
    found = [row for row in steps if "loss" in row]
    assert len(found) > 50
    assert all(row["loss"] == known[row["step"]] for row in found)
    assert found[0]["step"] == 0
    assert found[-1]["step"] == 1_999
