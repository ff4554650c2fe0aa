"""Durations of cells, read from earlier runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tpunb.runs.cell_times import with_last_times
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.spec import Block, PhaseKind, RunSpec

SCRIPT = "import os\nslow()\n\nquick()\ntrain()\n"
LINES = [("header", 1, 1), ("prelude", 2, 2), ("prelude", 4, 4), ("train", 5, 5)]


def blocks(*seconds: float | None) -> tuple[Block, ...]:
    given = [None, *seconds, None]
    return tuple(
        Block(role, first, last, number=first, seconds=took)  # type: ignore[arg-type]
        for (role, first, last), took in zip(LINES, given, strict=True)
    )


def ran(
    folder: Path, id: str, phases: Sequence[tuple[int | PhaseKind, float]], script: str = SCRIPT
) -> None:
    """Make a run whose phases began at these times: positions of cells, or other phases."""
    run = RunDir(folder / id)
    run.path.mkdir()
    os.chmod(run.path, 0o700)
    cells = blocks(None, None)
    run.write_spec(RunSpec(id, "n", 2, "CPU", "/", (), cells))
    run.script.write_text(script)
    for what, time in phases:
        if isinstance(what, PhaseKind):
            run.emit(Phase(what, "", time=time))
        else:
            run.emit(Phase(PhaseKind.PRELUDE, "", time=time, position=what, count=2))


def seconds(folder: Path, *known: float | None, script: str = SCRIPT) -> list[float | None]:
    run = RunDir(folder / "20260102-000000-n")
    return [block.seconds for block in with_last_times(blocks(*known), script, run)]


TRAINING = PhaseKind.TRAINING


def test_expected_cell_time_from_an_earlier_run(tmp_path: Path) -> None:
    ran(tmp_path, "20260101-000000-n", [(1, 10.0), (2, 14.0), (TRAINING, 14.5)])
    assert seconds(tmp_path, None, None) == [None, 4.0, 0.5, None]
    assert seconds(tmp_path, 9.0, None) == [None, 9.0, 0.5, None]
    # Another text is another cell, wherever it stands.
    changed = SCRIPT.replace("slow()", "other()")
    assert seconds(tmp_path, None, None, script=changed) == [None, None, 0.5, None]
