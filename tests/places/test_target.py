"""Estimates of the cost of a run: their text, and the most it can cost."""

from __future__ import annotations

import pytest

from tpunb.places.target import Estimate
from tpunb.runs.spec import Price

DOLLARS = Price(10.0, "v6e-16 in us-east5, on demand", "2026-11-21", "a catalogue")
QUOTA = Price(1.0, "TPU v5e-8", "2026-11-23", "the place", unit="TPU hours")


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
        (
            Estimate(DOLLARS, notes=("without an accelerator",)),
            None,
            None,
            [f"{DOLLARS}; no limit without --timeout", "without an accelerator"],
        ),
        (Estimate(DOLLARS), 1800.0, 5.0, [f"{DOLLARS}; at most $5.00, in 30 min 00 s"]),
        (
            Estimate(QUOTA, longest=9 * 3600.0, left=12.5, until="2026-11-28"),
            None,
            9.0,
            [
                "TPU v5e-8: 1.00 TPU hours an hour, as of 2026-11-23; at most 9.00 TPU hours, "
                "in 9 h 00 min",
                "left: 12.50 TPU hours, until 2026-11-28",
            ],
        ),
        (Estimate(QUOTA, longest=9 * 3600.0), 3600.0, 1.0, None),
    ],
)
def test_cost_estimate(
    estimate: Estimate, timeout: float | None, most: float | None, lines: list[str] | None
) -> None:
    assert estimate.most(timeout) == most
    if lines is not None:
        assert estimate.describe(timeout) == lines
