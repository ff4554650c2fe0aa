"""What tells runs apart in a legend."""

from __future__ import annotations

from typing import Any

import pytest

from tpunb.runs.labels import label_runs


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        ([("a", {"lr": 1}), ("b", {"lr": 2})], ["a", "b"]),
        ([("a", {"lr": 1, "n": 7}), ("a", {"lr": 2, "n": 7})], ["lr=1", "lr=2"]),
        ([("a", {"lr": 1}), ("a", {"lr": 2}), ("b", {"lr": 2})], ["a, lr=1", "a, lr=2", "b, lr=2"]),
        ([("a", {"lr": 1}), ("a", {"lr": 1})], ["a #2", "a #1"]),
    ],
)
def test_labels_say_what_differs(runs: list[tuple[str, dict[str, Any]]], labels: list[str]) -> None:
    ids = [f"2026-{9 - number}" for number in range(len(runs))]  # newest first
    assert label_runs([(*run, id) for run, id in zip(runs, ids, strict=True)]) == labels
