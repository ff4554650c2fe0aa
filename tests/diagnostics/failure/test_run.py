"""Diagnosis of a run from its folder."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.machine import FakeMachine
from tpunb.diagnostics.failure import run
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import FailureKind
from tpunb.utils import env_vars


def test_a_run_that_has_logged_a_step_has_trained(tmp_path: Path) -> None:
    result = RunResult("failed", "x", 2, "CPU", 0.0, 1.0, tmp_path, 1)
    assert run.observed_facts(result).stage is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run.observed_facts(result).stage == "step"


@pytest.mark.usefixtures("starts_processes")
def test_the_holder_of_the_tpu_of_a_run_that_has_just_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.log").write_text(
        "[0] TPU initialization failed: open(/dev/vfio/0): Device or resource busy\n"
    )
    with FakeMachine(tmp_path / "root").chips("v5e", 1) as made:
        monkeypatch.setenv(env_vars.ROOT, str(made.root))
        held = made.hold("vfio/0", kernel="other.ipynb")
        now = RunResult("failed", "x", 1, "TPU", 0.0, time.time(), tmp_path, 1)
        assert f"(process {held.pid} of " in str(run.observed_facts(now).device_holder)
        assert "the device is held by the kernel of other.ipynb" in str(run.diagnose_run(now)[0])
        long_ago = replace(now, ended=1.0)
        rehearsal = replace(now, device="CPU")
        assert run.observed_facts(long_ago).device_holder is None
        assert run.observed_facts(rehearsal).device_holder is None


def test_memory_is_compared_with_that_of_the_machine(tmp_path: Path) -> None:
    result = RunResult("failed", "x", 2, "CPU", 0.0, 1.0, tmp_path, 1)
    assert run.observed_facts(result).memory_limit is None
    used = replace(result, peak_memory=(6 * 2**30, 9 * 2**30), memory_limit=16 * 2**30)
    [line] = run.observed_facts(used).observations("step")
    assert line == "memory of all ranks at their peaks: 15.0 of 16.0 GiB"


@pytest.mark.parametrize(
    ("kind", "observed"), [(FailureKind.OUT_OF_MEMORY, True), (FailureKind.SIGNAL, None)]
)
def test_only_a_recorded_kill_is_evidence_of_memory(
    tmp_path: Path, kind: FailureKind, observed: bool | None
) -> None:
    message = "was killed with SIGKILL, most often because memory ran out (it held 1 GB)"
    failure = Failure(0, 1, -9, "SIGKILL", "Signal", message, None, None, "", 0.0, kind=kind)
    result = RunResult("failed", "x", 1, "CPU", 0.0, 1.0, tmp_path, 1, failures=(failure,))
    assert run.observed_facts(result).oom_killed is observed


def test_a_lost_host_is_the_cause_and_is_named(tmp_path: Path) -> None:
    said = "host h1 was lost: no heartbeat for 20 s"
    lost = Failure(
        None, None, None, None, "HostLost", said, None, None, "", 0.0,
        kind=FailureKind.HOST_LOST, host="h1",
    )  # fmt: skip
    result = RunResult("failed", "x", 4, "CPU", 0.0, 1.0, tmp_path, 1, failures=(lost,))
    (tmp_path / "run.log").write_text("[0] begun\n")
    [cause] = run.diagnose_run(result)
    assert cause.id == "host-lost"
    assert said in str(cause)
