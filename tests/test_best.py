"""Which value of a metric is its best."""

from __future__ import annotations

import math

import pytest

from tpunb import best


@pytest.mark.parametrize(
    ("name", "less"),
    [("loss", True), ("val_loss", True), ("eval/WER", True), ("trainLoss", True), ("rmse", True),
     ("accuracy", False), ("test-acc", False), ("top5", False), ("f1", False), ("macroF1", False),
     ("lr", None), ("tokens", None), ("step_time", None), ("error_score", None), ("glossy", None)],
)  # fmt: skip
def test_what_a_name_says(name: str, less: bool | None) -> None:
    better = best.better(name)
    assert (None if better is None else better(1.0, 2.0)) is less


def test_the_best_of_each_or_the_last() -> None:
    rows = [
        {"step": 1, "time": 1.0, "loss": 2.0, "lr": 0.1},
        {"step": 2, "time": 2.0, "loss": 0.5, "accuracy": 0.25},
        {"step": 3, "time": 3.0, "loss": math.nan, "accuracy": 0.75, "lr": 0.01},
        {"step": None, "time": 4.0, "accuracy": 0.5, "loss": 0.5},
    ]
    assert [str(one) for one in best.of(rows)] == [
        "best loss 0.5 (step 2)", "last lr 0.01", "best accuracy 0.75 (step 3)",
    ]  # fmt: skip
    assert best.of([{"step": 1, "loss": math.nan}]) == []
