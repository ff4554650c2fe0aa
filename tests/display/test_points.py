"""One value of those of all ranks: the same that `run.metrics(reduced=True)` gives."""

from __future__ import annotations

import math
from typing import Any

from tpunb import records
from tpunb.display.points import Points
from tpunb.events import Metric


def both(ranks: int, metrics: list[Metric]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By name, what the chart draws, and what the records of the same calls say."""
    points = Points(ranks)
    for metric in metrics:
        points.add(metric)
    rows = records.of_all_ranks(_kept(metrics))
    drawn = {name: points.of(name) for name in points.names}
    said = {name: sorted((row["step"], row[name]) for row in rows if name in row) for name in drawn}
    return drawn, said


def _kept(metrics: list[Metric]) -> list[records.Row]:
    last = max(metric.attempt for metric in metrics)
    first = min(m.step for m in metrics if m.attempt == last and m.step is not None)
    return [
        {"rank": m.rank, "step": m.step, "time": m.time, "reduce": dict(m.reduce), **m.values}
        for m in metrics
        if m.attempt == last or (m.step is not None and m.step < first)
    ]


def test_each_metric_is_reduced_as_its_ranks_have_asked() -> None:
    how = {"tokens": "sum", "worst": "max", "best": "min"}
    metrics = [
        Metric(rank, step, dict.fromkeys(("loss", *how), step + 10.0**rank), how)
        for step in (3, 1, 2)
        for rank in range(3)
    ]
    drawn, said = both(3, metrics)
    assert drawn == said
    assert drawn["tokens"] == [(1, 114.0), (2, 117.0), (3, 120.0)]
    assert [value for _, value in drawn["worst"]] == [101.0, 102.0, 103.0]


def test_a_step_that_only_some_ranks_have_logged_counts_them() -> None:
    drawn, said = both(4, [Metric(0, 1, {"loss": 2.0}), Metric(3, 1, {"loss": 4.0})])
    assert drawn == said == {"loss": [(1, 3.0)]}


def test_a_rank_that_logs_a_step_again_counts_with_the_last() -> None:
    metrics = [Metric(rank, 1, {"loss": value}) for value in (8.0, 2.0) for rank in range(2)]
    drawn, said = both(2, metrics)
    assert drawn == said == {"loss": [(1, 2.0)]}


def test_no_number_in_one_rank_is_none_for_all() -> None:
    drawn, _ = both(2, [Metric(0, 1, {"loss": math.nan}), Metric(1, 1, {"loss": 1.0})])
    [(step, value)] = drawn["loss"]
    assert step == 1
    assert math.isnan(value)


def test_another_attempt_begins_anew_where_it_begins() -> None:
    metrics = [Metric(0, step, {"loss": 1.0}) for step in range(5)]
    metrics += [Metric(0, step, {"loss": 9.0}, attempt=1) for step in (3, 4)]
    for ranks in (1, 2):  # all have logged a step, or only some
        drawn, said = both(ranks, metrics)
        assert drawn == said
        assert drawn["loss"] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)]
