"""Runs that wait for their turn, and the supervisor's log; no process is started."""

from __future__ import annotations

import fcntl
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drivers.kernel import ROOT
from tpunb.runs import directory
from tpunb.runs.events import Ended, Note, Phase
from tpunb.runs.protocol import Alive, StartRun, encode_message
from tpunb.runs.spec import PhaseKind, RunSpec, Stop, StopCause, StopOrigin
from tpunb.runs.state import request_stop
from tpunb.utils import files
from tpunb.worker.supervisor import device_lock, main
from tpunb.worker.supervisor.device_lock import RunDescription
from tpunb.worker.supervisor.main import QueuedRun


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[QueuedRun]:
    run = directory.create_run(tmp_path, "n")
    spec = RunSpec(run.id, "n", 2, "CPU", "/", (), ())
    run.write_spec(spec)
    queued = QueuedRun(StartRun(str(run.path), {}))
    yield queued
    queued.close()


def test_queued_run_names_the_run_it_waits_for_once(queued: QueuedRun) -> None:
    assert queued.device_holder() is None
    for _ in range(3):
        queued.wait_for(RunDescription("first", "2 CPU cores", 0.0))
    assert queued.dir.is_running(), "it is a run that goes on"
    queued.wait_for(RunDescription("second", "2 CPU cores", 0.0))
    queued.begin()
    phases = [event for event in queued.dir.read_events() if isinstance(event, Phase)]
    assert [phase.kind for phase in phases] == [
        PhaseKind.QUEUED,
        PhaseKind.QUEUED,
        PhaseKind.STARTING,
    ]
    assert "first" in phases[0].text
    assert "second" in phases[1].text
    assert not queued.dir.is_running(), "the lock is free for its supervision"


def test_queue_locked_by_another_process_does_not_block_the_supervisor(
    queued: QueuedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock, "lock_folder", lambda: tmp_path)
    monkeypatch.setattr(main, "DEVICE_CHECK", 0.0)
    monkeypatch.setattr(main, "BUSY_NOTE", 0.2)
    with open(tmp_path / "chips.lock", "w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        run = QueuedRun(StartRun(str(queued.dir.path), {}, device="chips"))
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            holder = run.device_holder()
            assert holder is not None, "it is not known to be its turn"
            run.wait_for(holder)
        phases = [event for event in run.dir.read_events() if isinstance(event, Phase)]
        assert [phase.text for phase in phases] == [
            f"waits for a process that keeps {tmp_path / 'chips.lock'} locked: end it, or continue "
            "it if it is stopped"
        ]
    assert run.device_holder() is None
    run.close()


def test_queue_that_cannot_be_read_does_not_block_runs(
    queued: QueuedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock, "lock_folder", lambda: tmp_path)
    run = QueuedRun(StartRun(str(queued.dir.path), {}, device="chips"))
    (tmp_path / "chips.lock").unlink()
    (tmp_path / "chips.lock").mkdir()
    assert run.device_holder() is None
    (note,) = run.dir.read_events()
    assert isinstance(note, Note)
    assert note.text.startswith("runs cannot wait for each other on this machine: ")
    run.close()


def test_stop_of_a_queued_run(queued: QueuedRun) -> None:
    queued.wait_for(RunDescription("first", "2 CPU cores", 0.0))
    stop = Stop(StopCause.USER, origin=StopOrigin.COMMAND)
    queued.cancel(replace(stop, reason="not needed"))
    result = queued.dir.read_result()
    assert result is not None
    assert (result.state, result.stop, result.reason) == ("interrupted", stop, "not needed")
    assert isinstance(queued.dir.read_events()[-1], Ended)
    assert not queued.dir.is_running()


def test_result_that_cannot_be_written_does_not_end_the_supervisor(queued: QueuedRun) -> None:
    queued.dir.result.mkdir()
    queued.cancel(Stop())
    assert isinstance(queued.dir.read_events()[-1], Ended)


def test_stop_requests_are_read_from_the_run_folder(queued: QueuedRun) -> None:
    assert list(queued.stop_requests()) == []
    files.append_text(queued.dir.requests, 'what is this?\n[1]\n{"do": "dance"}\n')
    files.append_text(queued.dir.requests, "[" * 100_000 + "\n")
    request_stop(queued.dir, Stop(reason="once", origin=StopOrigin.HANDLE))
    files.append_text(queued.dir.requests, '{"do": "stop", "origin": "a bird"}\n')
    files.append_text(queued.dir.requests, '{"do": "stop", "cause": "hung", "now": true}\n')
    assert list(queued.stop_requests()) == [
        Stop(StopCause.USER, "once", StopOrigin.HANDLE),
        Stop(StopCause.USER),
        Stop(StopCause.USER, now=True),
    ]


@pytest.mark.usefixtures("starts_processes")
def test_a_host_that_waits_for_its_turn_gives_signs_of_life() -> None:
    """Otherwise it would count as lost while another run has its TPU."""
    supervisor = subprocess.run(
        [sys.executable, "-c", "from tpunb.worker.supervisor import main; main.main()"],
        input=encode_message(Alive()),
        capture_output=True,
        cwd=ROOT,
        timeout=60,
    )
    assert encode_message(Alive()) in supervisor.stdout


MANY = """
import os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
for _ in range(1100):
    os.open("/dev/null", os.O_RDONLY)
from tpunb.worker.supervisor import main
main.main()
"""


@pytest.mark.usefixtures("starts_processes")
def test_a_supervisor_with_over_a_thousand_open_files() -> None:
    """As with kept preludes, hosts and runs that wait; `select` supports 1024 only."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1200:
        pytest.skip("no process may open so many files here")
    supervisor = subprocess.run(
        [sys.executable, "-c", MANY],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=ROOT,
        text=True,
        timeout=60,
    )
    assert "leaving: the kernel has ended" in supervisor.stderr
    assert supervisor.returncode == 0, supervisor.stderr
