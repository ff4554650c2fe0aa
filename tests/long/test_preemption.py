"""More of tests/worker/supervisor/test_preemption.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.metadata import FakeMetadataServer
from tests.support import Driver
from tpunb.runs.events import Output, Stopping
from tpunb.runs.spec import Stop, StopCause


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
