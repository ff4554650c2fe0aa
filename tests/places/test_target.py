"""Estimates of the cost of a run: their text, and the most it can cost."""

from __future__ import annotations

import pytest

from tpunb.places.target import Estimate
from tpunb.runs.spec import Price

DOLLARS = Price(10.0, "v6e-16 in us-east5, on demand", "2026-11-21", "a catalogue")


@pytest.mark.parametrize(
    ("estimate", "timeout", "most", "lines"),
    [
        (Estimate(), None, None, []),
        (
            Estimate(unknown="no node is there"),
            3600.0,
            None,
            ["the cost is not known: no node is there"],
        ),
        (Estimate(DOLLARS), None, None, [f"{DOLLARS}; no limit without --timeout"]),
        (Estimate(DOLLARS), 1800.0, 5.0, [f"{DOLLARS}; at most $5.00, in 30 min 00 s"]),
    ],
)
def test_cost_estimate(
    estimate: Estimate, timeout: float | None, most: float | None, lines: list[str]
) -> None:
    assert estimate.most(timeout) == most
    assert estimate.describe(timeout) == lines
