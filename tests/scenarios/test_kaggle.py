"""Train cells on Kaggle, from a notebook and from a shell: its own client, its stand-in.

Sessions run the pushed notebook for real. Their ranks are plain Python where torch is not what
matters (tests/fakes/torchless.py); one run trains on rehearsal cores.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.drivers import places
from tests.drivers.kaggle import KaggleProject, kaggle_project
from tests.drivers.kernel import Kernel, Ran, kernel, until
from tests.drivers.places import result_of
from tests.fakes.kaggle_kernels import Session
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState

WAIT = """
import os, time
print('begun', flush=True)
while not os.path.exists('{go}'):
    time.sleep(0.05)
print('went on', flush=True)
"""


@pytest.fixture(scope="module")
def kaggle(
    starts_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KaggleProject]:
    with (
        kaggle_project(tmp_path_factory.mktemp("kaggle")) as project,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in project.removed():
            patch.delenv(name, raising=False)
        project.without_torch()
        yield project


@pytest.fixture(scope="module")
def nb(kaggle: KaggleProject) -> Iterator[Kernel]:
    with kernel(kaggle.folder, "train.ipynb", **kaggle.login()) as made:
        made.run("%load_ext tpunb", "load").good()
        yield made


def tpunb(kaggle: KaggleProject, *words: str) -> subprocess.CompletedProcess[str]:
    return places.tpunb(kaggle.folder, kaggle.environment(), *words)


def newest(kaggle: KaggleProject) -> RunDir:
    return list_runs(kaggle.folder / "runs")[-1]


def result(kaggle: KaggleProject) -> RunResult:
    found = result_of(newest(kaggle))
    return found


def session(kaggle: KaggleProject) -> Session:
    *_, last = kaggle.service.sessions.values()
    return last


def train(
    nb: Kernel,
    body: str,
    options: str = "",
    *,
    cell: str = "train",
    begun: KaggleProject | None = None,
) -> Ran:
    """`begun`: only until all ranks have printed so."""
    before = list_runs(nb.folder / "runs")
    ran = nb.send(f"%%tpu_train --on kaggle {options}\n{body}", cell)
    if begun is None:
        return nb.wait(ran)
    until(lambda: len(list_runs(nb.folder / "runs")) > len(before), "a run")
    run = newest(begun)
    until(lambda: run.log.exists() and run.log.read_text().count("] begun") == 8, "its ranks")
    return ran


def waiting(path: Path) -> str:
    """A train cell that goes on once a file is there."""
    return WAIT.format(go=path)


def test_train_cell_on_kaggle(kaggle: KaggleProject, nb: Kernel) -> None:
    write = "import os\nopen('submission.csv', 'w').close()"
    ran = train(nb, f"{write}\nprint('rank', os.environ['RANK'])").good()
    assert re.findall(r"^\[kaggle/3\] rank 3$", ran.stdout, re.MULTILINE)
    assert "TpuV5E8 on Kaggle: 1.00 TPU hours an hour" in ran.stdout
    assert "left: 19.00 TPU hours" in ran.stdout
    assert "19.00 TPU hours left before the run, 19.00 now" in ran.stdout
    ended = result(kaggle)
    assert (ended.state, ended.world_size, ended.device) == (RunState.SUCCEEDED, 8, "TPU")
    assert (ended.hosts, ended.place) == (("kaggle",), "kaggle")
    assert ended.price is not None
    assert ended.price.unit == "TPU hours"
    assert ended.cost == pytest.approx(ended.duration / 3600, abs=1e-4)
    assert [Path(each).name for each in tpunb(kaggle, "fetch", "--files", "*.csv").stdout.split()]
    assert (newest(kaggle).path / "outputs/submission.csv").exists()
    assert "succeeded" in tpunb(kaggle, "runs").stdout
    # What people read on its page: the run's log, and nothing of the stream.
    notebook = nbformat.read(session(kaggle).folder / "executed.ipynb", as_version=4)
    [output] = notebook.cells[-1].outputs
    assert "[3] rank 3\n" in output.data["text/plain"]
    assert f"run {newest(kaggle).id} has ended: succeeded" in output.data["text/plain"]
    assert "tpunb~" not in output.data["text/plain"]
