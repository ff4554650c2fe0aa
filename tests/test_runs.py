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
    os.utime(lost.lock, (1_700_000_000.0,) * 2)
    goes_on = made(tmp_path, "goes-on")
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_700_000_000))
    with open(goes_on.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its guard does for as long as it lives
        heads, *rows = (re.split("  +", line) for line in runs.table(tmp_path).splitlines())
    assert [*heads] == ["run", "state", "cores", "time", "started", "size"]
    found = {row[0]: row[1:] for row in rows}
    assert found[done.id][:4] == ["succeeded", "16 CPU", "1 min 01 s", started]
    assert found[lost.id][:4] == ["lost", "2 CPU", "?", started]
    assert all(re.fullmatch(r"\d+ B", row[4]) for row in found.values())
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


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9949, "9.9 kB"), (9960, "10 kB"),
     (999_499, "999 kB"), (999_500, "1.0 MB"), (2_000_000_000, "2.0 GB"), (5 * 10**15, "5000 TB")],
)  # fmt: skip
def test_sizes(count: int, text: str) -> None:
    assert runs.size(count) == text


def test_the_log_of_a_run_that_goes_on_comes_as_it_grows(tmp_path: Path) -> None:
    run = made(tmp_path, "x")
    run.log.write_text("[0] a\n[1] b\n[0] c\n[0] half")
    with open(run.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole, mine = runs.follow(run, tail=2), runs.follow(run, rank=1)
        assert next(whole) == "[1] b\n[0] c\n"
        assert next(mine) == "[1] b\n"
        with run.log.open("a") as log:
            log.write(" and half\n[1] d\n")
        assert next(whole) == "[0] half and half\n[1] d\n"
        made_result = made(tmp_path, "y", state="succeeded").result
        made_result.rename(run.result)
    assert list(mine) == ["[1] d\n"]
    assert list(whole) == []


def test_what_a_living_run_goes_on_from_is_not_old(tmp_path: Path) -> None:
    first, other, follower = (made(tmp_path, name, state="failed") for name in "abc")
    rundir.write_json(follower.env, {"TPUNB_RESUME": str(first.checkpoints)})
    assert [one.run.id for one in runs.old(tmp_path, None, 0)] == [first.id, other.id, follower.id]
    follower.result.unlink()
    with open(follower.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [one.run.id for one in runs.old(tmp_path, None, 0)] == [other.id]
