"""Notebooks whose train cell runs in a cluster: pods behind a stand-in for kubectl.

Their ranks are plain Python (tests/fakes/torchless.py).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tests.drivers.kernel import kernel
from tests.drivers.nodes import until
from tests.drivers.places import gke_table, mirrors, printed, write_places
from tests.fakes.cluster import Cluster
from tpunb.runs import state
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState

BEGUN = "import os, time\nprint('begun', flush=True)\n"
GO_ON = f"{BEGUN}time.sleep(600)"


class Project:
    """A folder with `places.toml`, and the cluster that it names."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.variables = {
            **cluster.environment(),
            "HOME": str(folder),
            "CLOUDSDK_AUTH_ACCESS_TOKEN": "hush-token",
        }
        self.set_place()

    def set_place(self, **values: object) -> None:
        write_places(self.folder, gke=gke_table(**values))

    def start(self, train: str, options: str = "", *words: str) -> subprocess.Popen[str]:
        """`tpunb submit`."""
        cells = [v4.new_code_cell(f"%%tpu_train {options}\n{train}")]
        nbformat.write(v4.new_notebook(cells=cells), self.folder / "nb.ipynb")
        return self.tpunb("submit", "nb.ipynb", "--on", "gke", *words)

    def tpunb(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tpunb", *words],
            cwd=self.folder,
            env={**os.environ, **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def run(self) -> RunDir:
        return list_runs(self.folder / "runs")[-1]

    def result(self) -> RunResult:
        result = until(self.run.read_result)
        assert isinstance(result, RunResult)
        return result

    def log(self) -> list[str]:
        return printed(self.run)

    def await_lines(self, text: str, count: int) -> None:
        until(lambda: list_runs(self.folder / "runs") and self.log().count(text) >= count)

    def objects(self) -> list[str]:
        kinds = ("JobSet", "ConfigMap", "Secret")
        return [kind for kind in kinds for _ in self.cluster.objects(kind)]

    def await_nothing_left(self) -> None:
        until(lambda: not self.objects() and not self.cluster.left())


@pytest.fixture
def project(starts_processes: None, tmp_path: Path) -> Iterator[Project]:
    with Cluster(tmp_path / "cluster") as cluster:
        folder = tmp_path / "project"
        folder.mkdir()
        made = Project(folder, cluster)
        yield made
        made.await_nothing_left()


def finished(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=150)
    return out


def kill_mirror(run: RunDir) -> None:
    """The process that follows the run here, and its connections."""
    [mirror] = mirrors(run)
    os.killpg(mirror, signal.SIGKILL)
    until(lambda: state.run_state(run) is RunState.AWAY)


def test_train_cell_on_gke_asks_about_cost_and_is_interrupted(project: Project) -> None:
    project.cluster.set_queue("team", quota=16)
    project.set_place(queue="team", ask_above=1.0)
    with kernel(project.folder, "nb.ipynb", **project.variables) as nb:
        nb.run("%load_ext tpunb", "load").good()
        train = "%%tpu_train --on gke {}\nimport os\nprint('rank', os.environ['RANK'])"
        asked = nb.send(train.format(""), "ask")
        question = nb.client.get_stdin_msg(timeout=60)["content"]["prompt"]
        assert "It may cost more than 1 (ask_above of [places.gke]). Start it? [y/N]" in question
        nb.client.input("n")
        assert "not started, as the answer was no" in nb.wait(asked).screen()
        assert project.objects() == []
        ran = nb.run(train.format("--yes"), "train").good()
        assert re.search(r"rank 7$", ran.stdout, re.MULTILINE)
        assert "queue team: 2 waiting" in ran.screen()
        project.cluster.nodes = False
        ran = nb.send(train.format("--yes"), "train2")
        until(lambda: project.cluster.objects("Pod"))
        nb.interrupt()
        nb.wait(ran)
        assert project.result().state is RunState.INTERRUPTED
        project.await_nothing_left()


def test_detached_run_that_kubectl_does_not_create_is_an_error(project: Project) -> None:
    """In a cell and in a terminal, also if kubectl reports no error and prints anything."""
    path = project.variables["PATH"]
    script = f"""#!/bin/sh
for word in "$@"; do [ "$word" = create ] && echo "<html>" && exit; done
exec {shutil.which("kubectl", path=path)} "$@"
"""
    kubectl = project.folder / "bin/kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(script)
    kubectl.chmod(0o755)
    project.variables["PATH"] = f"{kubectl.parent}{os.pathsep}{path}"
    with kernel(project.folder, "nb.ipynb", **project.variables) as nb:
        nb.run("%load_ext tpunb", "load").good()
        shown = nb.run("%%tpu_train --on gke --detach\nprint(1)", "train").screen()
    process = project.start("print(1)", "", "--detach")
    printed = process.communicate(timeout=100)[0]
    assert process.returncode == 1
    for text in (shown, printed):
        assert "does not exist, although `kubectl create` has reported no error" in text
        assert "continues" not in text
