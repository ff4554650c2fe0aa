"""Runs in sessions of a stand-in for Colab: what a place does, and what remains after a failure.

Ranks are plain Python where torch does not matter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.colab import ColabProject, colab_project
from tests.drivers.kernel import until
from tests.fakes.colab import TOKEN
from tpunb.places import colab
from tpunb.places.colab import ColabPlace, ColabRun, ColabTarget
from tpunb.places.config import ColabSettings, PlaceConfig, find_place
from tpunb.runs import state
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec
from tpunb.utils.errors import TpunbError

BEGUN = "import time\nprint('begun', flush=True)\n"
SAVE = """
import os
saved = os.path.join(os.environ["TPUNB_RUN"], "checkpoints")
if os.environ["RANK"] == "0":
    os.makedirs(saved)
    open(os.path.join(saved, "last"), "w").write("saved")
"""
GO_ON = f"{BEGUN}time.sleep(600)"


@pytest.fixture(scope="module")
def _project(
    starts_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ColabProject]:
    with colab_project(tmp_path_factory.mktemp("colab")) as made:
        made.without_torch()
        yield made


@pytest.fixture
def project(_project: ColabProject, monkeypatch: pytest.MonkeyPatch) -> Iterator[ColabProject]:
    """A place `colab`; fails if a session or process is left."""
    for name, value in _project.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(_project.project)
    yield _project
    faults = ("login", "new", "upload", "download", "stop", "usage", "exec")
    _project.colab.fail(**dict.fromkeys(faults))
    _project.set_place()
    assert _project.colab.sessions == {}


def submit(project: ColabProject, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tpunb", "submit", "nb.ipynb", "--on", "colab", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def begun(project: ColabProject, known: set[str]) -> RunDir:
    """Wait for a new run whose ranks have begun."""

    def found() -> RunDir | None:
        for run in list_runs(project.project / "runs"):
            if run.id not in known and run.log.exists() and "begun" in run.log.read_text():
                return run
        return None

    made: RunDir = until(found, "ranks that have begun")
    return made


def runs(project: ColabProject) -> set[str]:
    return {run.id for run in list_runs(project.project / "runs")}


def result_of(run: RunDir) -> RunResult:
    result: RunResult | None = until(run.read_result, "a result")
    assert result is not None
    return result


def last(project: ColabProject) -> RunResult:
    return result_of(list_runs(project.project / "runs")[-1])


def test_colab_target_before_a_session_exists(tmp_path: Path) -> None:
    config = PlaceConfig("c", "colab", tmp_path / "places.toml", ColabSettings(accelerator="v5e1"))
    target = ColabTarget(config, tmp_path, tmp_path / "sub", None)
    assert (target.hosts, target.device, target.choose_cores(None)) == (("colab",), "TPU", 1)
    with pytest.raises(ValueError, match="2 cores: place c has 1 chips"):
        target.choose_cores(2)
    there = target.paths(["", str(tmp_path), "/elsewhere", str(tmp_path / "site-packages")])
    assert there == ("sub", (".", ".."))
    assert target.placed("r1", detached=True) == ColabRun(
        config, "tpunb-r1", str(tmp_path), detached=True
    )
    with pytest.raises(TpunbError, match="a new session has no checkpoints of run"):
        target.resume(RunDir(tmp_path))
    assert target.estimate.describe(None) == [
        "the cost is not known: Colab reports a session's compute units per hour only once it is "
        "allocated"
    ]


def _processes(*words: bytes) -> list[int]:
    """Processes with these words in their commands."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if set(words) <= set(command):
                found.append(int(entry.name))
    return found


def _uploads(project: ColabProject) -> int:
    """Number of uploads to the last session."""
    uploads = [words for words in project.colab.calls if words[0] == "upload"]
    return sum(words[2] == uploads[-1][2] for words in uploads)


SPEC = RunSpec("nb", "colab", 2, "CPU", ".", (), (), hosts=("colab",), place="colab")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"new": 412}, "Allocation refused"),
        ({"new": 400}, "Backend rejected accelerator"),
        ({"new": 503}, "Service Unavailable"),
        ({"upload": 503}, "`colab upload` failed"),
        ({"exec": "lost"}, "the session does not answer"),
        (
            {"new": 503, "stop": 503, "login": True},
            "not be released .* may still cost money",
        ),
    ],
    ids=["too-many", "quota", "service", "upload", "lost-at-once", "nothing-works"],
)
def test_start_failures_on_colab_are_explained(
    project: ColabProject, tmp_path: Path, fault: dict[str, object], says: str
) -> None:
    run = RunDir(tmp_path)
    run.write_spec(SPEC)
    config = find_place("colab", project.project)
    place = ColabPlace(run, ColabRun(config, "tpunb-refused", str(project.project)))
    project.colab.fail(**fault)
    with pytest.raises(TpunbError, match=says) as refused:
        place.start({}, lambda text: None, lambda: False)
    assert TOKEN not in str(refused.value)


def test_unnamed_colab_session_is_reported(project: ColabProject, tmp_path: Path) -> None:
    """Colab may have allocated the session before `colab` has recorded its name."""
    run = RunDir(tmp_path)
    run.write_spec(SPEC)
    config = find_place("colab", project.project)
    place = ColabPlace(run, ColabRun(config, "tpunb-nameless", str(project.project)))
    place._tool.new("?", "cpu")
    project.colab.fail(new=503)
    with pytest.raises(TpunbError, match="a session for which `colab` has no name"):
        place.start({}, lambda text: None, lambda: False)
    place._tool.stop("?")


def test_lost_run_message_names_the_session_that_may_still_cost(tmp_path: Path) -> None:
    """The mirror was killed, and the session is still allocated."""
    config = PlaceConfig("c", "colab", tmp_path / "places.toml", ColabSettings(accelerator="v5e1"))
    placed = ColabRun(config, "tpunb-lost", str(tmp_path))
    placed.write(RunDir(tmp_path))
    assert ColabRun.read(RunDir(tmp_path)) == placed
    assert "release it with `colab stop -s tpunb-lost`" in state.lost_message(RunDir(tmp_path))


def test_doctor(project: ColabProject) -> None:
    config = PlaceConfig("c", "colab", Path("places.toml"), ColabSettings(accelerator="v6e1"))
    report = colab.inspect_colab(config)
    assert report.text().splitlines() == [
        "place c (colab, places.toml)",
        f"{project.folder}/bin/colab, Version: 0.7.5",
        "no session is allocated",
        "83.20 compute units left; current use: 0.00 an hour",
        "ready: %%tpu_train --on c requests v6e1",
    ]
    assert report.problems() == []
    assert json.loads(json.dumps(report.to_json()))["compute_units"] == 83.2
    project.colab.fail(login=True)
    lost = colab.inspect_colab(config)
    assert "problem: `colab sessions` failed: Aborted." in lost.text()
    assert [host for host, _ in lost.problems()] == ["colab"]
