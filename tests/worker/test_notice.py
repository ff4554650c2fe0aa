from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import Driver
from tpunb.events import Output, Stopping
from tpunb.platforms.fakes import Server
from tpunb.worker import notice
from tpunb.worker.notice import Notice


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "INTERVAL", 0.05)


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("instance/preempted", "FALSE", "TRUE"),
        ("instance/maintenance-event", "NONE", "TERMINATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_a_notice_is_heard(
    monkeypatch: pytest.MonkeyPatch, path: str, before: str, after: str
) -> None:
    values = {path: before}
    with Server(values) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        watch = Notice()
        time.sleep(0.2)
        assert watch.text == ""
        values[path] = after
        wait_until(lambda: watch.text)
        assert watch.text == f"{path} is {after}"
        watch.close()


def test_nobody_answers_or_something_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server({"instance/preempted": "TRUE"}, "not Google's") as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        other = Notice()
        time.sleep(0.3)
        assert other.text == ""
    silent = Notice()  # the server has ended
    time.sleep(0.2)
    assert silent.text == ""


def test_a_run_on_a_machine_that_is_taken_away(
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
    with Server(values) as server:
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
    assert seen.result.reason == (
        "this machine is about to be taken away: instance/preempted is TRUE"
    )
    assert "run it again on another machine; with tpunb.save" in seen.result.explain()
    assert sorted(line for line in seen.log if "saved" in line) == ["[0] saved", "[1] saved"]
    assert [step.step for step in seen.of(Stopping)] == ["SIGINT"]
