"""Listings of runs and their logs, of folders as runs leave them."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path

import pytest

from tpunb import rundir, runs
from tpunb.errors import TpunbError
from tpunb.models import RunSpec
from tpunb.rundir import RunDir


def made(folder: Path, name: str, *, cores: int = 2, state: str | None = None) -> RunDir:
    run = rundir.create(folder, name)
    spec = RunSpec(run.id, name, cores, "CPU", "/", (), ())
    rundir.write_json(run.spec, spec.to_json())
    os.utime(run.spec, (1_700_000_000.0, 1_700_000_000.0))
    run.lock.touch()
    if state is not None:
        result = {
            "state": state, "name": name, "world_size": cores, "device": "CPU",
            "started": 1_700_000_000.0, "ended": 1_700_000_061.0, "failures": [], "returns": [],
        }  # fmt: skip
        rundir.write_json(run.result, result)
    return run


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert runs.table(tmp_path / "none") == f"There are no runs in {tmp_path}/none yet."
    (tmp_path / "file").touch()
    assert runs.table(tmp_path) == f"There are no runs in {tmp_path} yet."


def test_how_runs_stand(tmp_path: Path) -> None:
    done = made(tmp_path, "done", state="succeeded", cores=16)
    lost = made(tmp_path, "lost")
    goes_on = made(tmp_path, "goes-on")
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_700_000_000))
    with open(goes_on.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its guard does for as long as it lives
        heads, *rows = (re.split("  +", line) for line in runs.table(tmp_path).splitlines())
    assert [*heads] == ["run", "state", "cores", "time", "started"]
    found = {row[0]: row[1:] for row in rows}
    assert found[done.id] == ["succeeded", "16 CPU", "1 min 01 s", started]
    assert found[lost.id] == ["lost", "2 CPU", "?", started]
    assert found[goes_on.id][:2] == ["running", "2 CPU"]
    assert found[goes_on.id][2].endswith(" min")


def test_the_log_by_rank_and_from_its_end(tmp_path: Path) -> None:
    run = made(tmp_path, "x", cores=12)
    lines = [
        "[prelude] read",
        "[1] a\x0cb\u2028c",
        "[1 err] oh",
        "[11] e",
        "[1 prelude] p",
        "[0] z",
    ]
    run.log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert runs.log(run) == run.log.read_text(encoding="utf-8")
    assert runs.log(run, rank=1) == "[1] a\x0cb\u2028c\n[1 err] oh\n[1 prelude] p\n"
    assert runs.log(run, rank=11, tail=5) == "[11] e\n"
    assert runs.log(run, tail=2) == "[1 prelude] p\n[0] z\n"
    assert runs.log(run, tail=0) == ""
    assert runs.log(run, rank=2) == ""
    with pytest.raises(TpunbError, match="has no rank 12: its ranks are 0 to 11"):
        runs.log(run, rank=12)


def test_a_log_that_is_empty_not_there_or_not_utf8(tmp_path: Path) -> None:
    run = made(tmp_path, "x")
    assert runs.log(run) == ""
    run.log.touch()
    assert runs.log(run) == ""
    run.log.write_bytes(b"[0] \xff\n")
    assert runs.log(run) == "[0] \ufffd\n"


def test_runs_are_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs.default_folder() == tmp_path / "runs"
