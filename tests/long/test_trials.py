"""More of tests/kernel/test_trials.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.kernel import kernel, until
from tpunb.runs import state
from tpunb.runs.directory import list_runs


@pytest.mark.usefixtures("lent")
def test_supervisor_state_after_its_kernel_has_ended(tmp_path: Path) -> None:
    train = "%%tpu_train --cores 1"
    with kernel(tmp_path) as nb:
        nb.run("%load_ext tpunb").good()
        nb.run(f"{train} --detach --name far\nimport time\ntime.sleep(3)").good()
        assert "near" in nb.run(f"{train}\nprint('near')").good().stdout
        nb.run(f"{train} --bg --name later\nimport time\ntime.sleep(600)").good()
        [later] = [run for run in list_runs(tmp_path / "runs") if run.id.endswith("later")]
        until(lambda: later.events.exists() and "RanksStarted" in later.events.read_text(), "begun")
        nb.run("%unload_ext tpunb").good()
        assert state.run_state(later) == "interrupted"
    [far] = [run for run in list_runs(tmp_path / "runs") if run.id.endswith("far")]
    until(lambda: not state.run_state(far).active, "the detached run has ended")
    assert state.run_state(far) == "succeeded"
    with kernel(tmp_path, "next.ipynb") as nb:
        nb.run("%load_ext tpunb").good()
        assert "next" in nb.run(f"{train}\nprint('next')").good().stdout
