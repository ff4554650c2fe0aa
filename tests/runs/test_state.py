"""The state of runs, and requests to them, through their folders."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from tests.runs.test_listing import made
from tpunb.errors import TpunbError
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase, Stopping
from tpunb.runs.spec import PhaseKind, Stop, StopOrigin


def age(run: RunDir, seconds: float = 3600.0) -> None:
    """Make a folder and its files older."""
    for path in [*run.path.iterdir(), run.path]:
        os.utime(path, (time.time() - seconds,) * 2)


class TestState:
    def test_state_of_an_active_run(self, tmp_path: Path) -> None:
        run = made(tmp_path, "x")
        with open(run.lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert state.run_state(run) == "running"
            run.emit(Phase(PhaseKind.QUEUED, "waits for run y"))
            assert state.run_state(run) == "waiting"
            run.emit(Phase(PhaseKind.STARTING, "starting"))
            assert state.run_state(run) == "running"
            run.emit(Stopping("SIGINT", "asked"))
            assert state.run_state(run) == "stopping"
            with open(run.events, "a") as file:
                file.write('{"kind": "Pha')  # the disk is full
            assert state.run_state(run) == "stopping"

    def test_state_of_a_new_run_is_starting(self, tmp_path: Path) -> None:
        run = made(tmp_path, "x")
        run.lock.unlink()
        assert state.run_state(run) == "starting"
        age(run)
        assert state.run_state(run) == "lost"

    @pytest.mark.parametrize("text", [None, "", '{"state": "succ', "[]", '{"state": "succeeded"}'])
    def test_state_of_a_run_left_by_a_crash_is_lost(self, tmp_path: Path, text: str | None) -> None:
        run = made(tmp_path, "x", state="succeeded")
        assert state.run_state(run) == "succeeded"
        run.result.unlink()
        if text is not None:
            run.result.write_text(text)
        age(run)
        assert state.run_state(run) == "lost"
        run.spec.write_text("")
        assert state.run_state(run) == "lost"
        with pytest.raises(TpunbError, match="is lost: its supervisor or its machine has ended"):
            state.read_spec(run)


class TestStop:
    def test_stop_of_a_run_that_has_ended(self, tmp_path: Path) -> None:
        run = made(tmp_path, "x", state="succeeded")
        [line] = state.stop_run(run, "asked")
        assert line.startswith(f"run {run.id} has ended: succeeded, at 2023-11-1")
        assert line.endswith(", after 61.0 s")
        assert not run.requests.exists()

    def test_stop_requests_are_private_lines(self, tmp_path: Path) -> None:
        run = made(tmp_path, "x")
        state.request_stop(run, Stop(reason="one"))
        state.request_stop(run, Stop(reason="two", origin=StopOrigin.COMMAND, now=True))
        assert [json.loads(line) for line in run.requests.read_text().splitlines()] == [
            {"do": "stop", "cause": "interrupt", "reason": "one", "origin": None, "now": False},
            {"do": "stop", "cause": "interrupt", "reason": "two", "origin": "command", "now": True},
        ]
        assert run.requests.stat().st_mode & 0o077 == 0

    def test_stop_of_a_lost_run(self, tmp_path: Path) -> None:
        run = made(tmp_path, "x")
        age(run)
        with pytest.raises(TpunbError, match=f"run {run.id} is lost: .* are in {run.path}"):
            list(state.stop_run(run, "asked"))
        assert not run.requests.exists()


class TestWhich:
    def test_active_runs_are_found_first(self, tmp_path: Path) -> None:
        done, on, also = (
            made(tmp_path, "net-a", state="failed"),
            made(tmp_path, "net-b"),
            made(tmp_path, "dense"),
        )
        newest = made(tmp_path, "net-c", state="succeeded")
        for run in (on, also):
            age(run)
        with open(on.lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert state.find_active(tmp_path, None).id == on.id
            assert state.find_active(tmp_path, "net").id == on.id
            assert state.find_active(tmp_path, "net-a").id == done.id
            with pytest.raises(TpunbError, match="has 'nothing' in its id"):
                state.find_active(tmp_path, "nothing")
        with pytest.raises(TpunbError, match=r"'net' matches several runs: "):
            state.find_active(tmp_path, "net")
        os.utime(newest.spec)
        assert state.find_active(tmp_path, None).id == newest.id
        with pytest.raises(TpunbError, match="there are no runs in "):
            state.find_active(tmp_path / "none", None)


def test_an_ended_run_is_read_again_only_when_one_of_its_files_has_changed(tmp_path: Path) -> None:
    run, reads = made(tmp_path, "x", state="succeeded"), list[RunDir]()

    @state.remembered
    def read(run: RunDir) -> str:
        reads.append(run)
        return run.result.read_text()

    assert read(run) == read(RunDir(run.path)), "just written: it may be written again"
    assert len(reads) == 2
    age(run)
    text = read(run)
    assert read(run) == text
    assert len(reads) == 3
    now = run.result.stat()
    other = text.replace("succeeded", "timed_out")
    assert len(other) == len(text)
    run.result.unlink()
    run.result.write_text(other)  # within one tick of the clock
    os.utime(run.result, ns=(now.st_atime_ns, now.st_mtime_ns + 1))
    assert (read(run), len(reads)) == (other, 4)
    run.metrics.write_text("{}\n")
    assert [read(run), read(run)] == [other, other]
    assert len(reads) == 6, "its metrics are new"
    age(run)
    run.result.unlink()
    with pytest.raises(FileNotFoundError):
        read(run)
