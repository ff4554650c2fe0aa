"""What a run's folder says about its failure."""

from __future__ import annotations

from pathlib import Path

from tpunb.diagnosis import runs
from tpunb.models import RunResult


def test_a_run_that_has_logged_a_step_was_at_work(tmp_path: Path) -> None:
    result = RunResult("failed", "x", 2, "CPU", 0.0, 1.0, tmp_path, 1)
    assert runs.facts(result).stage is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert runs.facts(result).stage == "step"
