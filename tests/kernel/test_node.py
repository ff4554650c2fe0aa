"""`tpunb node` before anything runs; tests of whole runs are in tests/scenarios."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tpunb.kernel import node
from tpunb.machine.machine import detect_machine
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils.version import installed_versions


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.script.write_text("print(1)\n")
    run.write_spec(RunSpec("id", "n", 2, "CPU", "~/nets", ("src", "/lib"), (), hosts=("h0", "h1")))
    return run


def test_the_spec_gets_this_hosts_paths(run: RunDir, tmp_path: Path) -> None:
    made = node._localized(run)
    assert made.cwd == f"{tmp_path}/ann/nets"
    assert Path(made.cwd).is_dir()
    assert made.sys_path[:3] == ("", f"{made.cwd}/src", "/lib")
    assert any("site-packages" in entry for entry in made.sys_path)
    assert run.read_spec() == made
    assert stat.S_IMODE(run.spec.stat().st_mode) == 0o600


def test_facts_contain_everything_that_must_be_the_same(run: RunDir) -> None:
    found = node.facts(run, run.read_spec(), detect_machine({}))
    assert found["ranks on each host"] == "1"
    assert found["torch"] == installed_versions()["torch"]
    run.script.write_text("print(2)\n")
    changed = node.facts(run, run.read_spec(), detect_machine({}))
    assert changed["the script"] != found["the script"]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("line", ["", "hello", '{"kind": "Ready"}', '{"kind": "StartNode"}'])
def test_a_first_line_that_starts_no_run(line: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tpunb", "node"], input=f"{line}\n", capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(
        "the first line of standard input does not start a run"
    )
