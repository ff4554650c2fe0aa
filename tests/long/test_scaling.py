"""More of tests/kernel/test_scaling.py, which takes longer."""

from __future__ import annotations

import pytest

import tpunb
from tests.kernel.test_scaling import FLOPS, runs
from tpunb.runs.result import RunResult


def test_scaling_table_has_a_row_per_run_and_reference(runs: dict[int, RunResult]) -> None:
    table = tpunb.scaling(runs[2], runs[1], others={"A100": 1e6}, peak=1e-6)
    assert list(table.index) == [runs[1].dir.name, runs[2].dir.name, "A100"]
    one, two, other = (row for _, row in table.iterrows())
    assert (one["cores"], two["cores"]) == (1, 2)
    assert (one["speedup"], one["efficiency"]) == (1.0, 1.0)
    # Each rank has logged its own speed: their sum is the run's.
    logged = runs[2].metrics()["samples_per_second"]
    assert len(logged) == 2
    assert two["samples_per_second"] == pytest.approx(logged.sum())
    assert two["per_core"] == pytest.approx(logged.mean())
    assert two["speedup"] == pytest.approx(logged.sum() / one["samples_per_second"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    assert two["mfu"] == pytest.approx(logged.sum() * FLOPS / (2 * 1e6))
    assert other["speedup"] == pytest.approx(1e6 / one["samples_per_second"])
    assert table["cores"].isna().tolist() == [False, False, True]
    assert "dollars" not in table
