"""Listings of runs, of folders as they leave them."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path

import pytest

from tpunb import listings, rundir
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
    assert listings.table(tmp_path / "none") == f"There are no runs in {tmp_path}/none yet."
    (tmp_path / "file").touch()
    assert listings.table(tmp_path) == f"There are no runs in {tmp_path} yet."


def test_how_runs_stand(tmp_path: Path) -> None:
    done = made(tmp_path, "done", state="succeeded", cores=16)
    lost = made(tmp_path, "lost")
    os.utime(lost.lock, (1_700_000_000.0,) * 2)
    goes_on = made(tmp_path, "goes-on")
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_700_000_000))
    with open(goes_on.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its guard does for as long as it lives
        heads, *rows = (re.split("  +", line) for line in listings.table(tmp_path).splitlines())
    assert [*heads] == ["run", "state", "cores", "time", "started", "size"]
    found = {row[0]: row[1:] for row in rows}
    assert found[done.id][:4] == ["succeeded", "16 CPU", "1 min 01 s", started]
    assert found[lost.id][:4] == ["lost", "2 CPU", "?", started]
    assert all(re.fullmatch(r"\d+ B", row[4]) for row in found.values())
    assert found[goes_on.id][:2] == ["running", "2 CPU"]
    assert found[goes_on.id][2].endswith(" min")


def test_runs_are_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert listings.default_folder() == tmp_path / "runs"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9949, "9.9 kB"), (9960, "10 kB"),
     (999_499, "999 kB"), (999_500, "1.0 MB"), (2_000_000_000, "2.0 GB"), (5 * 10**15, "5000 TB")],
)  # fmt: skip
def test_sizes(count: int, text: str) -> None:
    assert listings.size(count) == text


def test_what_a_living_run_goes_on_from_is_not_old(tmp_path: Path) -> None:
    first, other, follower = (made(tmp_path, name, state="failed") for name in "abc")
    rundir.write_json(follower.env, {"TPUNB_RESUME": str(first.checkpoints)})
    found = [one.run.id for one in listings.old(tmp_path, None, 0)]
    assert found == [first.id, other.id, follower.id]
    follower.result.unlink()
    with open(follower.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [one.run.id for one in listings.old(tmp_path, None, 0)] == [other.id]
