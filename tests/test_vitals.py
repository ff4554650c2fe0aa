"""How ranks stand, from the files that they leave."""

from __future__ import annotations

import os
from pathlib import Path

from tpunb import beat, vitals
from tpunb.beat import Beat
from tpunb.events import Bar
from tpunb.rundir import RunDir


def test_what_the_ranks_leave_is_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt(1, 0).mkdir(parents=True)
    data = bytearray(beat.SIZE)
    Beat(1, 5, 4, 9, 3, 2, 1_500_000_000).pack_into(data)
    run.pulse(1, 0).write_bytes(data)
    run.progress(1, 0).write_text(
        '{"bars": [{"name": "epoch", "done": 1, "total": 3}], "samples": 64}'
    )
    one, other = vitals.look(run, 1, [os.getpid(), 2**22 + 1]).ranks
    assert other is None
    assert one is not None
    assert (one.begun, one.steps, one.collectives, one.waiting) == (True, 9, 4, True)
    assert (one.compiling, one.compilations, one.compile_seconds) == (True, 2, 1.5)
    assert (one.bars, one.samples) == ((Bar("epoch", 1, 3),), 64)
    assert 1_000_000 < one.memory < 10**12
    assert vitals.resident(2**22 + 1) == 0
