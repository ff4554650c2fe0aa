"""More of tests/scenarios/test_deadlocks.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.test_deadlocks import ELSEWHERE
from tests.support import Driver
from tpunb.runs.events import Note


def test_long_wait_in_a_collective_is_noted_while_the_run_continues(
    driver: Driver, tmp_path: Path
) -> None:
    seen = driver.run(
        [],
        ELSEWHERE,
        ranks=3,
        when=lambda event: isinstance(event, Note),
        then=lambda run: (tmp_path / "told").touch(),
        cwd=str(tmp_path),
    )
    assert seen.result.state == "succeeded"
    (note,) = seen.of(Note)
    assert note.text.startswith("waiting in a collective for 15 s: 0,2; not in it: 1\n")
    assert "ranks 0, 2: in xm.all_reduce, cell [1], line 5: total = xm.all_reduce(" in note.text
    assert "rank 1: at cell [1], line 8: while not os.path.exists(" in note.text
