"""Diagnosis of a run from its folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.fakes.machine import FakeMachine
from tests.notebook.lint.notebooks import notebook
from tpunb.diagnostics.failure import run
from tpunb.runs.directory import RunDir
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import FailureKind
from tpunb.utils import env_vars


def test_a_run_that_has_logged_a_step_has_trained(tmp_path: Path) -> None:
    result = RunResult("failed", "x", 2, "CPU", 0.0, 1.0, tmp_path, 1)
    assert not run.observed_facts(result).trained
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run.observed_facts(result).trained


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
    [line] = run.observed_facts(used).observations(at_start=False)
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


@pytest.mark.parametrize(
    ("source", "kind", "cell", "named"),
    [
        ("mp.spawn(train)", FailureKind.EXCEPTION, 1, True),
        ("mp.spawn(train)", FailureKind.PEER_LOST, 2, True),
        ("mp.spawn(train)", FailureKind.EXCEPTION, 2, False),
        ("# tpu: skip\nmp.spawn(train)", FailureKind.PEER_LOST, 2, False),
        ("%%tpu_train\nmp.spawn(train)", FailureKind.PEER_LOST, 2, False),
    ],
)
def test_a_cell_that_did_not_finish_in_the_kernel_comes_first(
    tmp_path: Path, source: str, kind: FailureKind, cell: int, named: bool
) -> None:
    (tmp_path / "run.log").write_text(
        "[0] PeerLostError: rank 1 has returned from the train cell\n"
    )
    failure = Failure(0, 1, 1, None, "DistNetworkError", "", cell, 2, "", 0.0, kind=kind)
    result = RunResult("failed", "x", 2, "CPU", 0.0, 1.0, tmp_path, 1, failures=(failure,))
    saved = notebook(source, "%%tpu_train\nprint(data)")
    cells = (replace(saved.cells[0], failed=True), saved.cells[1])
    (tmp_path / "notebook.json").write_text(json.dumps(asdict(replace(saved, cells=cells))))
    found = [(one.id, one.confidence) for one in run.diagnose_run(result)]
    assert (found[:1] == [("unfinished-cell", 0.95)]) == named


@pytest.mark.parametrize("text", ["", "{}", '{"cells": [{}], "train": 0}'])
def test_a_folder_without_its_notebook(tmp_path: Path, text: str) -> None:
    (tmp_path / "notebook.json").write_text(text)
    (tmp_path / "run.log").write_text("OSError: [Errno 28] No space left on device\n")
    result = RunResult("failed", "x", 2, "CPU", 0.0, 1.0, tmp_path, 1)
    assert [one.id for one in run.diagnose_run(result)] == ["disk-full"]


def test_the_log_of_a_run_that_succeeded_has_no_failure(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("OSError: [Errno 28] No space left on device\n")
    assert run.diagnose_log(log, 0) is None
    assert run.diagnose_log(log, None)
    result = RunResult("succeeded", "x", 2, "CPU", 0.0, 1.0, tmp_path, 0)
    RunDir(tmp_path).write_result(result)
    assert run.diagnose_log(log, None) is None
