"""More of tests/scenarios/test_kaggle.py, which takes longer."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import nbformat
import pytest

from tests.data.archives import zipped
from tests.drivers.kaggle import KEY, KaggleProject
from tests.drivers.kernel import Kernel, kernel, until
from tests.drivers.places import mirrors
from tests.fakes.kaggle_server import Stored
from tests.scenarios.test_kaggle import (
    kaggle,
    nb,
    newest,
    result,
    session,
    tpunb,
    train,
    waiting,
)
from tpunb.runs import returns, state
from tpunb.runs.spec import FailureKind, RunState


def test_interrupt_stops_following_and_attach_follows_again(
    kaggle: KaggleProject, nb: Kernel, tmp_path: Path
) -> None:
    ran = train(nb, waiting(tmp_path / "go"), begun=kaggle)
    run = newest(kaggle)
    url = f"https://www.kaggle.com/code/somebody/tpunb-{run.id}"
    nb.interrupt()

    def told() -> bool:
        nb.read(ran)
        return "Interrupt again to stop following it" in ran.stdout

    until(told, "why it is not stopped")
    assert url in ran.stdout
    nb.interrupt()
    nb.wait(ran).good()
    assert f"run {run.id} continues without this notebook" in ran.stdout
    assert state.run_state(run) is RunState.RUNNING
    stopped = tpunb(kaggle, "stop", run.id)
    assert stopped.returncode == 1
    assert f"run {run.id} is still running: Kaggle has no way to stop" in stopped.stderr
    assert url in stopped.stderr
    (tmp_path / "go").touch()
    attached = nb.run(f"%tpu_attach {run.id}").good()
    assert "went on" in attached.stdout
    assert result(kaggle).state is RunState.SUCCEEDED


def test_attach_after_kernel_and_mirror_were_killed(kaggle: KaggleProject, tmp_path: Path) -> None:
    """Whoever asks next follows it from where it was, and every line is there once."""
    with kernel(kaggle.folder, "lost.ipynb", **kaggle.login()) as nb:
        nb.run("%load_ext tpunb", "load").good()
        train(nb, waiting(tmp_path / "go"), begun=kaggle)
        os.kill(nb.pid, signal.SIGKILL)
    run = newest(kaggle)
    [mirror] = mirrors(run)
    os.kill(mirror, signal.SIGKILL)
    until(lambda: state.run_state(run) is RunState.AWAY, "a run that nobody follows")
    (tmp_path / "go").touch()
    kaggle.service.cut_after = [3]
    attached = tpunb(kaggle, "attach", run.id)
    assert attached.returncode == 0, attached.stderr
    assert run.log.read_text().count("] begun") == run.log.read_text().count("] went on") == 8
    assert result(kaggle).state is RunState.SUCCEEDED


def test_failure_if_the_kaggle_session_is_killed(
    kaggle: KaggleProject, nb: Kernel, tmp_path: Path
) -> None:
    ran = train(nb, waiting(tmp_path / "go"), begun=kaggle)
    kaggle.service.kill(session(kaggle))
    nb.wait(ran)
    assert "Kaggle has ended its session before the run had ended" in ran.screen()
    [failure] = result(kaggle).failures
    assert failure.kind is FailureKind.HOST_LOST


def test_failure_if_the_kaggle_session_has_no_torch_xla(kaggle: KaggleProject, nb: Kernel) -> None:
    kaggle.service.without_xla = True
    try:
        ran = train(nb, "pass")
    finally:
        kaggle.service.without_xla = False
    assert "this Kaggle session has no torch_xla, although" in ran.screen()
    [failure] = result(kaggle).failures
    assert failure.kind is FailureKind.REFUSED


def test_resume_and_data_inputs_on_kaggle(kaggle: KaggleProject, nb: Kernel) -> None:
    kaggle.service.files["datasets/me/cats"] = Stored(zipped(**{"downloaded.csv": b"1"}))
    kaggle.service.mounts["datasets/me/cats"] = "datasets/me/cats"
    nb.run("%tpu_data kaggle://datasets/me/cats --to data/cats", "data").good()
    save = "import os\nif os.environ['RANK'] == '0':\n    os.makedirs('tpunb-run/checkpoints/1')\n"
    write = "    open('tpunb-run/checkpoints/1/w', 'w').close()"
    train(nb, save + write, cell="below").good()  # the other train cell is above the data
    run = newest(kaggle)
    look = "import os\nprint(os.listdir('data/cats'), os.listdir(os.environ['TPUNB_RESUME']))"
    train(nb, look, f"--resume {run.id}", cell="below").good()
    assert "[0] ['mounted.csv'] ['1']" in newest(kaggle).log.read_text()
    assert session(kaggle).asked["datasetDataSources"] == ["me/cats"]
    assert session(kaggle).asked["kernelDataSources"] == [f"somebody/tpunb-{run.id}"]
    assert result(kaggle).resumed_from == run.id


def test_submit_from_a_shell_returns_values_and_leaks_no_key(kaggle: KaggleProject) -> None:
    """Without a TPU the session has rehearsal cores: torch, metrics, returns, no secret."""
    kaggle.set_place(accelerator="", files=["helper.py"], cores=2)
    torchless = kaggle.service.environment.pop("PYTHONPATH")
    (kaggle.folder / "helper.py").write_text("X = 7\n")
    v4 = nbformat.v4
    parameters = v4.new_code_cell("lr = 0.1", metadata={"tags": ["parameters"]})
    body = """%%tpu_train --returns final
import torch, torch_xla, tpunb, helper
from torch_xla import runtime
for step in range(3):
    tpunb.log(step, loss=lr / (step + 1))
print("world", runtime.world_size(), helper.X)
final = helper.X * lr
"""
    notebook = v4.new_notebook(cells=[parameters, v4.new_code_cell(body)])
    nbformat.write(notebook, kaggle.folder / "shell.ipynb")
    try:
        done = tpunb(kaggle, "submit", "shell.ipynb", "--on", "kaggle", "-p", "lr", "0.5")
    finally:
        kaggle.set_place()
        kaggle.service.environment["PYTHONPATH"] = torchless
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[kaggle/0-1] world 2 7" in done.stdout
    ended = result(kaggle)
    metrics = ended.metrics()
    rank0 = metrics[metrics["rank"] == 0]
    assert rank0["loss"].tolist() == pytest.approx([0.5, 0.25, 0.5 / 3])
    spec = newest(kaggle).read_spec()
    assert returns.collect_returns(ended, spec).returns["final"] == 3.5
    kept = [*newest(kaggle).path.rglob("*"), *session(kaggle).folder.rglob("*")]
    for path in (path for path in kept if path.is_file()):
        assert KEY.encode() not in path.read_bytes(), path


def test_failure_on_kaggle_names_rank_cell_and_line(kaggle: KaggleProject, nb: Kernel) -> None:
    ran = train(nb, "import os\nif os.environ['RANK'] == '3':\n    raise ValueError('bad batch')")
    assert re.search(r"rank 3 failed in cell \[\d+\], line 4: ValueError: bad", ran.screen())
    assert result(kaggle).state is RunState.FAILED
    # Kaggle keeps the output of a session that has succeeded.
    assert session(kaggle).status == "COMPLETE"
