"""More of tests/scenarios/test_background.py, which takes longer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.drivers.kernel import PATIENCE, ROOT, Kernel, kernel, until
from tests.scenarios.test_background import (
    PRELUDE,
    UNTIL_TOLD,
    _nothing_of_another_test,
    at_work,
    last_run,
    listen,
    nb,
    train,
)
from tpunb.runs.directory import list_runs
from tpunb.utils import processes


def test_background_handle_is_displayed_and_returns_its_values(nb: Kernel) -> None:
    ran = train(nb, f"{UNTIL_TOLD}\nprint('done', rank())\nn = 5", "--bg --returns n --out h")
    ran.good()
    assert ran.texts == []
    assert ran.value is None  # it is displayed already
    bundle, *panel = ran.displays.values()
    assert set(bundle) == {"text/plain", "text/html"}
    # Where ipywidgets has been imported by now: the place of the panel.
    place = f"log: runs/{last_run(nb).id}/run.log (%tpu_logs searches it)"
    assert panel in ([], [{"text/plain": place}])
    at_work(nb)
    assert nb.value("h.state, h.result, tpunb.last_run is h") == ("running", None, False)
    shown = nb.run("h", "show").good()
    assert list(shown.displays) == list(ran.displays)
    assert re.match(
        r"'BackgroundRun [\d-]+-digits: running \(.wait\(\) ", repr(nb.value("repr(h)"))
    )
    # Lines of two ranks are one only where they come at the same time.
    lines = (r"^\[0(-1)?\] at work$", r"^\[(0-)?1\] at work$")
    said, bundle = listen(nb, ran, *lines, "training · 2 of 2 ranks")
    assert said == ""
    assert "at work" in bundle["text/html"]

    (nb.folder / "go on").touch()
    said, bundle = listen(nb, ran, "succeeded")
    assert said == ""
    assert bundle["text/plain"].startswith("succeeded · 2 ranks · rehearsal on CPU · ")
    assert {"[0] done 0", "[1] done 1"} < set(bundle["text/plain"].splitlines())
    until(lambda: nb.value("h.result is not None"), "the result")
    assert nb.value("tpunb.last_run is h.result, h.state, 'n' in globals()") == (
        True,
        "succeeded",
        False,
    )
    assert nb.value("h.result.returns") == {"n": 5}
    waited = nb.run("h.wait()", "wait").good()
    assert waited.shown.startswith("RunResult succeeded on 2 rehearsal cores")
    assert nb.value("n, h.wait() is tpunb.last_run") == (5, True)


def test_background_failure_is_shown_and_raised_by_wait(nb: Kernel) -> None:
    ran = train(nb, "if rank() == 1:\n    raise ValueError('bad batch')", "--bg --out h").good()
    _, bundle = listen(nb, ran, "rank 1 failed in", "raise ValueError")
    text = f"rank 1 failed in cell [{ran.number}], line 3: ValueError: bad batch"
    assert bundle["text/plain"].startswith(f"{text} · 2 ranks")
    assert "raise ValueError('bad batch')" in bundle["text/plain"]
    assert "raise ValueError(&#x27;bad batch&#x27;)" in bundle["text/html"]
    waited = nb.run("h.wait()", "wait")
    assert waited.error is not None
    assert waited.error["ename"] == "RankFailedError"
    assert text in waited.traceback
    assert "background" not in waited.traceback
    assert nb.value("h.result.state, tpunb.last_run.state") == ("failed", "failed")
    nb.run("%%tpu_train --bg --out h --no-raise\n1 / 0", "train").good()
    assert nb.value("h.wait().state") == "failed"


@pytest.mark.usefixtures("starts_processes")
def test_background_handle_in_a_saved_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nbclient keeps: the handle as it was at last, in the cell that made it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [
        "%load_ext tpunb",
        "import time",
        "%%tpu_train --bg --cores 2 --out h\ntime.sleep(1)\nprint('line')",
        "print('meanwhile')",
        "h.wait()",
    ]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(made, kernel_name="python3", resources=resources, timeout=500).execute()
    [handle] = made.cells[2].outputs
    assert handle.data["text/plain"].startswith("succeeded · 2 ranks · rehearsal on CPU")
    # A kernel under load may send one print in pieces.
    assert "".join(out.text for out in made.cells[3].outputs) == "meanwhile\n"
    [value] = made.cells[4].outputs
    assert value.data["text/plain"].startswith("RunResult succeeded on 2")


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("how", ["restart", "unload"])
def test_kernel_end_stops_background_runs(how: str, tmp_path: Path) -> None:
    source = """
try:
    pathlib.Path("at work " + os.environ["RANK"]).touch()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path("saved " + os.environ["RANK"]).touch()
    raise
"""
    with kernel(tmp_path) as nb:
        nb.run(f"%load_ext tpunb\n{PRELUDE}", "load").good()
        train(nb, source, "--bg --cores 2").good()
        train(nb, "print('never')", "--bg --cores 2").good()
        at_work(nb)
        everyone = nb.processes()
        assert len(nb.working()) == 3  # runner, two ranks
        if how == "restart":
            nb.restart()
        else:
            nb.run("%unload_ext tpunb", "unload").good()
        until(lambda: not any(map(processes.is_alive, everyone)), "all gone")
        assert len(list(tmp_path.glob("saved *"))) == 2
        for run in list_runs(tmp_path / "runs"):
            result = run.read_result()
            assert result is not None
            assert (result.state, result.reason) == ("interrupted", "the kernel has ended")


@pytest.mark.usefixtures("starts_processes")
def test_detached_run_is_followed_and_stopped_from_a_terminal(nb: Kernel) -> None:
    train(nb, f"{UNTIL_TOLD}", "--detach --name far").good()
    at_work(nb)
    run = last_run(nb)
    # A new supervisor is there for the next cells, which run beside it on processors.
    assert "beside" in train(nb, "print('beside')").good().stdout
    tpunb = [sys.executable, "-m", "tpunb"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*tpunb, "logs", "--follow", "far"],
        cwd=nb.folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as logs:
        assert logs.stdout is not None
        assert logs.stdout.readline().startswith("[tpunb] rehearsal on CPU")
        assert sorted(logs.stdout.readline() for _ in range(2)) == [
            "[0] at work\n",
            "[1] at work\n",
        ]
        done = subprocess.run(
            [*tpunb, "stop", "far"], cwd=nb.folder, env=env, text=True, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert f"run {run.id} has ended: interrupted" in done.stdout.splitlines()[-1]
        rest, error = logs.communicate(timeout=PATIENCE)
    assert rest == ""
    assert f"tpunb: run {run.id} has ended: interrupted (stopped with tpunb stop)" in error
    ran = nb.run("%tpu_attach far", "attach")
    assert ran.error is not None
    assert ran.error["ename"] == "RunInterruptedError"
    again = nb.run("%tpu_attach far --no-raise", "attach").good()
    assert again.shown.startswith("RunResult stopped (stopped with tpunb stop)")
    assert "there is no rank 7" in nb.run("%tpu_attach far --ranks 7", "attach").stderr
    assert "-far " in nb.run("%tpu_runs", "list").good().screen()
