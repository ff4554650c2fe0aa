"""What a run's folder says about its failure."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tpunb.diagnosis import runs
from tpunb.models import RunResult
from tpunb.platforms import machine
from tpunb.platforms.fakes.machine import FakeMachine


def test_a_run_that_has_logged_a_step_was_at_work(tmp_path: Path) -> None:
    result = RunResult("failed", "x", 2, "CPU", 0.0, 1.0, tmp_path, 1)
    assert runs.facts(result).stage is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert runs.facts(result).stage == "step"


def test_who_has_the_tpu_of_a_run_that_has_just_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.log").write_text(
        "[0] TPU initialization failed: open(/dev/vfio/0): Device or resource busy\n"
    )
    with FakeMachine(tmp_path / "root").chips("v5e", 1) as made:
        monkeypatch.setenv(machine.ROOT, str(made.root))
        held = made.hold("vfio/0", kernel="other.ipynb")
        now = RunResult("failed", "x", 1, "TPU", 0.0, time.time(), tmp_path, 1)
        assert f"(process {held.pid} of " in str(runs.facts(now).device_holder)
        assert "the device is held by the kernel of other.ipynb" in str(runs.of_run(now)[0])
        long_ago = replace(now, ended=1.0)
        rehearsal = replace(now, device="CPU")
        assert runs.facts(long_ago).device_holder is None
        assert runs.facts(rehearsal).device_holder is None


def test_memory_is_compared_with_what_the_machine_has(tmp_path: Path) -> None:
    result = RunResult("failed", "x", 2, "CPU", 0.0, 1.0, tmp_path, 1)
    assert runs.facts(result).memory_limit is None
    used = replace(result, peak_memory=(6 * 2**30, 9 * 2**30), memory_limit=16 * 2**30)
    [line] = runs.facts(used).observations("step")
    assert line == "memory of all ranks at their peaks: 15.0 of 16.0 GiB"
