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
        ([("a", {"lr": 0.1 + 0.2}), ("a", {})], ["lr=0.3", "a"]),
        ([("a", {"lr": 1}), ("a", {"lr": 2}), ("b", {"lr": 2})], ["a, lr=1", "a, lr=2", "b, lr=2"]),
        ([("a", {"lr": 1}), ("a", {"lr": 1})], ["a #2", "a #1"]),
        ([("a", {"lr": 1}), ("a", {"lr": 2}), ("a", {"lr": 1})], ["lr=1 #2", "lr=2", "lr=1 #1"]),
    ],
)
def test_labels_say_what_differs(runs: list[tuple[str, dict[str, Any]]], labels: list[str]) -> None:
    ids = [f"2026-{9 - number}" for number in range(len(runs))]  # newest first
    assert label_runs([(*run, id) for run, id in zip(runs, ids, strict=True)]) == labels


def test_labels_are_short() -> None:
    given = [{f"p{name}": f"{'x' * 30}{number}" for name in range(9)} for number in range(2)]
    first, second = label_runs([("a", values, str(n)) for n, values in enumerate(given)])
    assert first.startswith("p0=xxx")
    assert first != second
    assert len(first) < 70
