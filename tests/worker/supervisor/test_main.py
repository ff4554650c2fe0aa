"""Runs that wait for their turn, and the supervisor's log; no process is started."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpunb.runs import directory
from tpunb.runs.events import Ended, Phase
from tpunb.runs.protocol import StartRun, StopRun
from tpunb.runs.spec import PhaseKind, RunSpec, Stop, StopCause, StopOrigin
from tpunb.runs.state import request_stop
from tpunb.utils import files
from tpunb.worker.supervisor.device_lock import RunDescription
from tpunb.worker.supervisor.main import QueuedRun, SupervisorLog


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[QueuedRun]:
    run = directory.create_run(tmp_path, "n")
    spec = RunSpec(run.id, "n", 2, "CPU", "/", (), ())
    files.write_json(run.spec, spec.to_json())
    queued = QueuedRun(StartRun(str(run.path), {}))
    yield queued
    queued.close()


def test_a_run_that_waits_says_for_which_one_once(queued: QueuedRun) -> None:
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


def test_a_run_that_is_stopped_before_its_turn(queued: QueuedRun) -> None:
    queued.wait_for(RunDescription("first", "2 CPU cores", 0.0))
    stop = Stop(StopCause.USER, StopOrigin.COMMAND)
    queued.cancel(stop, "not needed")
    result = queued.dir.read_result()
    assert result is not None
    assert (result.state, result.stop, result.reason) == ("interrupted", stop, "not needed")
    assert isinstance(queued.dir.read_events()[-1], Ended)
    assert not queued.dir.is_running()


def test_a_result_that_cannot_be_written_ends_nothing(queued: QueuedRun) -> None:
    queued.dir.result.mkdir()
    queued.cancel(Stop(StopCause.USER), "not needed")
    assert isinstance(queued.dir.read_events()[-1], Ended)


def test_requests_to_stop_come_through_the_folder(queued: QueuedRun) -> None:
    assert list(queued.stop_requests()) == []
    files.append_text(queued.dir.requests, 'what is this?\n[1]\n{"do": "dance"}\n')
    request_stop(queued.dir, "once", origin=StopOrigin.HANDLE)
    files.append_text(queued.dir.requests, json.dumps({"do": "stop", "origin": "a bird"}) + "\n")
    folder = str(queued.dir.path)
    assert list(queued.stop_requests()) == [
        StopRun(folder, StopCause.USER, "once", StopOrigin.HANDLE, now=False),
        StopRun(folder, StopCause.USER, "", None, now=False),  # has it seen the first one?
    ]


def test_the_log_is_in_every_run_folder_that_is_open(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = SupervisorLog()
    log = logging.getLogger("tpunb.worker.supervisor.main")
    try:
        log.info("without a run")
        first, second = tmp_path / "first", tmp_path / "second"
        for folder in (first, second):
            folder.mkdir()
            handler.open_run(folder)
        handler.open_run(tmp_path / "deleted")
        log.info("with two")
        handler.close_run(first)
        log.info("with one")
        handler.close_run(second)
        handler.close_run(tmp_path / "deleted")
    finally:
        logging.getLogger("tpunb").removeHandler(handler)
    assert "without a run" in capfd.readouterr().err
    assert (first / "supervisor.log").read_text().count("with") == 1
    assert (second / "supervisor.log").read_text().count("with") == 2
    assert (first / "supervisor.log").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device is always full here")
def test_a_full_disk_does_not_end_the_supervisor(tmp_path: Path) -> None:
    handler = SupervisorLog()
    try:
        (tmp_path / "supervisor.log").symlink_to("/dev/full")
        handler.open_run(tmp_path)
        logging.getLogger("tpunb").info("lost")
        handler.close_run(tmp_path)
    finally:
        logging.getLogger("tpunb").removeHandler(handler)
