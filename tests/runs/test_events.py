from __future__ import annotations

import pytest

from tpunb.runs.events import Ended, Event, Note, Phase, Stopping, from_line, to_line
from tpunb.runs.spec import PhaseKind, RunState, Stop, StopCause, StopOrigin


@pytest.mark.parametrize(
    "event",
    [
        Phase(PhaseKind.PRELUDE, "prelude, cell 2 of 4 [3]", 3, 1.5, 2, 4, 12.5, None),
        Note("n", 2.0),
        Stopping("SIGINT", "enough", 2.5, Stop(StopCause.USER, StopOrigin.HANDLE)),
        Ended(RunState.FAILED, 3.0),
    ],
)
def test_events_survive_serialization(event: Event) -> None:
    assert from_line(to_line(event)) == event
