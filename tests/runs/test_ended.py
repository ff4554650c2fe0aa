"""Ended runs, as the scripts of later runs read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import tpunb
from tpunb.errors import RunError, TpunbError
from tpunb.runs import last_run
from tpunb.runs.directory import RunDir
from tpunb.runs.ended import EndedRun, read_run
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that has returned `ended_value` but not `lost`."""
    monkeypatch.setattr(last_run, "result", None)
    folder = RunDir(tmp_path / "run")
    folder.returns.mkdir(parents=True)
    spec = RunSpec("run", "n", 2, "CPU", "/", (), (), returns=("ended_value", "lost"))
    folder.write_spec(spec)
    torch.save([1, torch.ones(2)], folder.returns / "ended_value.pt")
    report = {"ended_value": {"file": "ended_value.pt"}, "lost": {"error": "no"}}
    (folder.returns / "report.json").write_text(json.dumps(report))
    folder.write_result(RunResult(RunState.SUCCEEDED, "n", 2, "CPU", 1.0, 2.0, folder.path))
    folder.metrics.write_text('{"step": 1, "rank": 0, "time": 1.5, "loss": 0.25}\n')
    return folder


def test_ended_run_result_has_returns_and_is_last_run(run: RunDir) -> None:
    result = read_run(str(run.path))
    assert tpunb.last_run is result
    number, ones = result.returns["ended_value"]
    assert (number, ones.tolist(), result.returns_failed) == (1, [1.0, 1.0], {"lost": "no"})
    assert result.metrics()["loss"].tolist() == [0.25]
    with pytest.raises(TpunbError, match=r"`lost`, which the notebook got from run run, .*: no$"):
        read_run(str(run.path), "ended_value", "lost")


def test_ended_run_handle_binds_its_returns_on_wait(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = EndedRun(str(run.path))
    main = vars(sys.modules["__main__"])
    monkeypatch.delitem(main, "ended_value", raising=False)
    assert (handle.id, handle.state, handle.dir) == ("run", RunState.SUCCEEDED, run.path)
    assert handle.stop() is handle.result is handle.wait(timeout=1)
    assert main.pop("ended_value") is handle.result.returns["ended_value"]
    assert repr(handle) == "BackgroundRun run: succeeded (.wait() .stop() .result .state)"


def test_ended_run_wait_raises_for_a_failed_run(run: RunDir) -> None:
    run.write_result(RunResult(RunState.HUNG, "n", 2, "CPU", 1.0, 2.0, run.path))
    assert EndedRun(str(run.path), raises=False).wait().state is RunState.HUNG
    with pytest.raises(RunError):
        EndedRun(str(run.path)).wait()


def test_ended_run_folder_that_was_removed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        TpunbError, match=r"the values of run gone are no longer in .*: run its cell"
    ):
        read_run(str(tmp_path / "gone"))
