"""The processes of a sweep's trials."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.drivers.kernel import kernel, until
from tpunb.kernel import papermill, trials
from tpunb.runs import state
from tpunb.runs.directory import list_runs


@pytest.mark.usefixtures("starts_processes")
def test_an_error_of_papermills_own_is_the_trials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An error such as a full disk, with a message of any length."""

    def execute(*arguments: Any, **options: Any) -> None:
        raise OSError("no space left" + 1_000_000 * " on device")

    monkeypatch.setattr(papermill, "execute", execute)
    names = "notebook ran output cores on trials".split()
    order = {**dict.fromkeys(names, "x"), "parameters": {}}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 2)
        lent: Any = SimpleNamespace(folder=tmp_path)
        trials._become_papermill(order, theirs, parent, lent)
    theirs.close()
    with ours:
        said = json.loads(ours.recv(1 << 20) or "{}")
    os.waitpid(pid, 0)
    assert said.get("failed")
    assert said["error"].startswith("OSError: no space left on device")


@pytest.mark.usefixtures("lent")
def test_the_state_of_a_lent_supervisor_after_a_kernel(tmp_path: Path) -> None:
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
