from __future__ import annotations

import pytest

from tpunb.runs.events import Ended, Event, Note, Phase, Stopping, from_line, to_line
from tpunb.runs.spec import Block, PhaseKind, RunState, Stop, StopCause, StopOrigin


@pytest.mark.parametrize(
    "event",
    [
        Phase(PhaseKind.PRELUDE, "prelude, cell 2 of 4 [3]", 3, 1.5, 2, 4, 12.5, None),
        Note("n", 2.0),
        Stopping("SIGINT", "enough", 2.5, Stop(StopCause.USER, origin=StopOrigin.HANDLE)),
        Ended(RunState.FAILED, 3.0),
    ],
)
def test_events_survive_serialization(event: Event) -> None:
    assert from_line(to_line(event)) == event


def test_a_train_cell_above_is_not_counted_as_a_cell_that_runs() -> None:
    cells = [
        Block("prelude", 1, 1, 0, 3, 2.0),
        Block("prelude", 2, 3, 1, 9, values=True),
        Block("prelude", 4, 4, 2, 5, 1.0),
    ]
    first, values, last = (Phase.of_prelude(cells, index) for index in range(3))
    assert (first.text, first.expected, first.rest) == ("prelude, cell 1 of 2 [3]", 2.0, 1.0)
    assert (values.text, values.expected) == ("prelude, reading the values of cell [9]", None)
    assert (last.text, last.expected, last.rest) == ("prelude, cell 2 of 2 [5]", 1.0, 0)
