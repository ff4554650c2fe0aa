"""Runs of versions before `"version"` in spec.json, with texts for fields that are data today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpunb.runs.events import Phase, Stopping, from_line
from tpunb.runs.result import RunResult
from tpunb.runs.spec import FailureKind, PhaseKind, RunState, Stop, StopCause, StopOrigin

FAILURE = {
    "rank": 1,
    "pid": 7,
    "exitcode": -9,
    "signal": "SIGKILL",
    "type": "Signal",
    "message": "was killed because memory ran out (it held 3.1 GB at most; the kernel's log)",
    "cell": None,
    "line": None,
    "traceback": "",
    "time": 5.0,
}
RESULT = {
    "state": "failed",
    "name": "digits",
    "world_size": 2,
    "device": "CPU",
    "started": 1.0,
    "ended": 6.0,
    "failures": [FAILURE],
    "reason": "rank 1 has failed",
    "returns": [],
}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("waits for run x (2 CPU cores, since 12:00)", PhaseKind.QUEUED),
        ("starting", PhaseKind.STARTING),
        ("prelude, cell [3]", PhaseKind.PRELUDE),
        ("training", PhaseKind.TRAINING),
        ("no sign of life: reading the stacks of all ranks", PhaseKind.COLLECTING_STACKS),
        ("timed_out", PhaseKind.ENDED),
    ],
)
def test_phase_kind_from_events_of_older_versions(text: str, kind: PhaseKind) -> None:
    line = json.dumps({"kind": "Phase", "text": text, "time": 1.5})
    assert from_line(line) == Phase(kind, text, time=1.5)


@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        ("interrupted in the notebook", Stop(StopCause.USER, origin=StopOrigin.NOTEBOOK)),
        ("stopped with tpunb stop", Stop(StopCause.USER, origin=StopOrigin.COMMAND)),
        ("stopped with .stop()", Stop(StopCause.USER, origin=StopOrigin.HANDLE)),
        ("--timeout 5 s", Stop(StopCause.TIMEOUT)),
        ("this machine is about to be taken away: at noon", Stop(StopCause.PREEMPTED)),
        ("rank 2 has failed", Stop(StopCause.PEER_FAILED)),
        ("who knows", None),
    ],
)
def test_stop_reason_from_events_of_older_versions(reason: str, stop: Stop | None) -> None:
    line = json.dumps({"kind": "Stopping", "step": "SIGINT", "reason": reason, "time": 1.5})
    assert from_line(line) == Stopping("SIGINT", reason, 1.5, stop)


def test_result_of_older_versions_is_readable(tmp_path: Path) -> None:
    result = RunResult.from_json(RESULT, tmp_path)
    assert result.state is RunState.FAILED
    assert result.stop == Stop(StopCause.PEER_FAILED)
    assert result.failures[0].kind is FailureKind.OUT_OF_MEMORY
