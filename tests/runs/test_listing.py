"""Lists of runs, read from run folders."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from tpunb.runs import directory, listing
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils import files


def made(folder: Path, name: str, *, cores: int = 2, state: str | None = None) -> RunDir:
    run = directory.create_run(folder, name)
    spec = RunSpec(run.id, name, cores, "CPU", "/", (), ())
    run.write_spec(spec)
    os.utime(run.spec, (1_700_000_000.0, 1_700_000_000.0))
    run.lock.touch()
    if state is not None:
        result = {
            "state": state,
            "name": name,
            "world_size": cores,
            "device": "CPU",
            "started": 1_700_000_000.0,
            "ended": 1_700_000_061.0,
            "failures": [],
            "returns": [],
        }
        files.write_json(run.result, result)
    return run


def test_listing_shows_the_states_of_runs(tmp_path: Path) -> None:
    done = made(tmp_path, "done", state="succeeded", cores=16)
    lost = made(tmp_path, "lost")
    os.utime(lost.lock, (1_700_000_000.0,) * 2)
    goes_on = made(tmp_path, "goes-on")
    with open(goes_on.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its supervisor does for as long as it lives
        heads, *rows = (
            re.split("  +", line) for line in str(listing.list_runs(tmp_path)).splitlines()
        )
    assert heads == ["run", "state", "cores", "time"]  # the others have no values
    found = {row[0]: row[1:] for row in rows}
    assert found[done.id] == ["succeeded", "16 CPU", "1 min 01 s"]
    assert found[lost.id] == ["lost", "2 CPU", "?"]
    assert found[goes_on.id][:2] == ["running", "2 CPU"]
    assert found[goes_on.id][2].endswith(" min")


def test_listing_shows_newest_runs_with_best_values_and_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        run = made(tmp_path, f"n{number}", state="succeeded")
        os.utime(run.spec, (1_700_000_000.0 + number,) * 2)
        run.values.write_text(json.dumps({"lr": number * 0.1, "seed": 7, "name": "x\n" * 50}))
        row = {"rank": 0, "attempt": 0, "step": 1, "time": 1.0, "loss": 2.0 - number, "lr": 1}
        run.metrics.write_text(json.dumps(row) + "\n")
    run.snapshot.write_text('{"path": "/tmp/x/digits.ipynb"}')
    result = json.loads(run.result.read_text())
    failure = dict.fromkeys(("rank", "pid", "exitcode", "signal", "cell", "line"))
    failure |= {"rank": 0, "type": "E", "message": "no", "traceback": "", "time": 0.0}
    result |= {"state": "failed", "failures": [failure]}
    files.write_json(run.result, result)
    monkeypatch.setattr(listing, "NEWEST", 2)
    _, *rows, rest = str(listing.list_runs(tmp_path)).splitlines()
    assert [row.split("  ")[0].rpartition("-")[2] for row in rows] == ["n3", "n2"]
    assert re.search(r"  failed +loss -1  lr=0\.3 .*  digits\.ipynb  rank 0 failed: E", rows[0])
    assert "  loss 0   lr=0.2  " in rows[1]
    assert rest == "and 2 older: --all"
    assert len(str(listing.list_runs(tmp_path, whole=True)).splitlines()) == 5
    monkeypatch.setattr(listing, "NEWEST", 1)
    [_, alone, _] = str(listing.list_runs(tmp_path)).splitlines()
    assert re.search(r"  lr=0.3, seed=7, name=(x )+x?…  2 CPU .* rank 0 ", alone)
    [_, row, _, _, _, whole] = listing.describe_removal(listing.list_stored(tmp_path)).splitlines()
    assert re.search(r"  \d+ B  ", row)
    assert re.match(r"4 runs, [\d.]+ k?B$", whole)


def test_clean_keeps_a_run_that_an_active_run_resumed_from(tmp_path: Path) -> None:
    first, other, follower = (made(tmp_path, name, state="failed") for name in "abc")
    files.write_json(follower.env, {"TPUNB_RESUME": str(first.checkpoints)})
    found = [one.run.id for one in listing.find_old(tmp_path, None, 0)]
    assert found == [first.id, other.id, follower.id]
    follower.result.unlink()
    with open(follower.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [one.run.id for one in listing.find_old(tmp_path, None, 0)] == [other.id]


def test_run_folder_without_a_spec_after_a_crash_is_listed(tmp_path: Path) -> None:
    """With any of the entries that a run folder may have."""
    entries = (
        "supervisor.log values.json values.pt place.json given hosts run.log attempts events.jsonl"
    ).split()
    for name in entries:
        path = tmp_path / f"20260101-000000-{name}"
        path.mkdir(mode=0o700)
        (path / name).touch()
    curves = "events.out.tfevents.1767225600.host"
    (tmp_path / "20260101-000000-run.log" / curves).touch()
    for name in ("notes.txt", curves):  # the second one is of a program that calls TensorBoard
        path = tmp_path / f"20260101-000000-other-{name}"
        path.mkdir(mode=0o700)
        (path / name).touch()
    listed = sorted(entry.run.id for entry in listing.list_stored(tmp_path))
    assert listed == sorted(f"20260101-000000-{name}" for name in entries)
