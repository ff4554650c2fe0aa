"""The trace of `--profile`: if it cannot be written, the run still continues."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.spec import Profile
from tpunb.worker import step_trace
from tpunb.worker.step_trace import StepTrace


def fail(kind: type[Exception]) -> Any:
    def call(*given: object) -> None:
        raise kind("No space left on device")

    return call


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.attempt(0, 1).mkdir(parents=True)
    return run


@pytest.mark.parametrize("failing", ["mkdir", "start_trace", "stop_trace"])
def test_profile_on_a_full_disk_is_only_noted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    calls = dict.fromkeys(("start_trace", "stop_trace"), lambda *folder: None)
    if failing in calls:
        calls[failing] = fail(RuntimeError)  # torch_xla's, for any problem of its files
    else:
        run.profile.write_text("")  # no folder can be made below a file
    monkeypatch.setattr(step_trace, "_make_profiler", lambda: SimpleNamespace(**calls))
    steps = StepTrace(Profile((), 2, 3), run, 0, 1)
    for step in range(1, 5):
        steps.after(step)
    [note] = [event for event in run.read_events() if isinstance(event, Note)]
    assert note.text.startswith("rank 1: --profile has no trace: ")
    assert run.step_times(0, 1).exists()  # where the time went is known without it


def test_profile_and_note_that_cannot_be_written_end_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = SimpleNamespace(start_trace=fail(OSError), stop_trace=fail(OSError))
    monkeypatch.setattr(step_trace, "_make_profiler", lambda: profiler)
    monkeypatch.setattr(RunDir, "emit", fail(OSError))
    StepTrace(Profile((), 1, 1), run, 0, 1).after(1)
