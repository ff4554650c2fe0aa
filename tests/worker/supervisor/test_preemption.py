from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.metadata import FakeMetadataServer
from tests.support import Driver
from tpunb.runs.events import Output, Stopping
from tpunb.runs.spec import Stop, StopCause
from tpunb.worker.supervisor import preemption
from tpunb.worker.supervisor.preemption import PreemptionWatcher

TRUE, STOP = "TRUE", "TERMINATE_ON_HOST_MAINTENANCE"


def notice_after(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[str | Exception | None, str]]
) -> str:
    """The notice after these pairs of answers, for 'preempted' and 'maintenance-event'.

    An exception stands for a pair that is not answered. Then the run ends.
    """
    values: Iterator[str | Exception | None] = iter(
        [
            value
            for one, other in answers
            for value in ((one,) if isinstance(one, Exception) else (one, other))
        ]
    )
    used_up = threading.Event()

    def read(host: str, key: str, timeout: float) -> str | None:
        value = next(values, ConnectionRefusedError())
        if isinstance(value, ConnectionRefusedError):
            used_up.set()
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setenv("GCE_METADATA_HOST", "nowhere")
    monkeypatch.setattr(preemption, "read_metadata", read)
    watcher = PreemptionWatcher(interval=0.0)
    for thread in threading.enumerate():
        if thread.name == "tpunb-preemption":
            while thread.is_alive() and not used_up.is_set():
                thread.join(0.01)
            watcher.close()
            thread.join(20)
    return watcher.notice


def test_preemption_notice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = ("FALSE", "NONE")
    assert notice_after(monkeypatch, [quiet, (TRUE, "NONE")]) == "instance/preempted is TRUE"
    assert notice_after(monkeypatch, [quiet, quiet, ("FALSE", STOP)]) == (
        f"instance/maintenance-event is {STOP}"
    )
    assert notice_after(monkeypatch, [(None, "MIGRATE_ON_HOST_MAINTENANCE"), quiet]) == ""
    assert notice_after(monkeypatch, []) == ""


def test_preemption_check_tolerates_a_slow_server_after_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: tuple[Exception, str] = (TimeoutError(), "")
    quiet = ("FALSE", "NONE")
    assert notice_after(monkeypatch, [quiet, slow, (TRUE, "NONE")]) == "instance/preempted is TRUE"
    assert notice_after(monkeypatch, [slow, (TRUE, "NONE")]) == ""


@pytest.mark.usefixtures("starts_processes")
def test_preemption_stops_the_run_with_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"instance/preempted": "FALSE"}
    train = """
        import time
        try:
            print("here", flush=True)
            time.sleep(100)
        except KeyboardInterrupt:
            print("saved", flush=True)
            raise
    """
    with FakeMetadataServer(values) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        driver = Driver(tmp_path)
        said: set[int | None] = set()

        def both(event: object) -> bool:
            if isinstance(event, Output) and "here" in event.text:
                said.add(event.rank)
            return len(said) == 2

        try:
            driver.warm()
            seen = driver.run(
                [], train, when=both, then=lambda run: values.update({"instance/preempted": "TRUE"})
            )
        finally:
            driver.launcher.close()
    assert seen.result.state == "interrupted"
    assert seen.result.stop == Stop(StopCause.PREEMPTED)
    assert seen.result.reason == (
        "this machine is about to be shut down: instance/preempted is TRUE"
    )
    assert "run it again on another machine; with tpunb.save" in seen.result.explain()
    assert sorted(line for line in seen.log if "saved" in line) == ["[0] saved", "[1] saved"]
    assert [step.step for step in seen.of(Stopping)] == ["SIGINT"]
