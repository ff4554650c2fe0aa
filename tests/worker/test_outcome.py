"""What is a failure of its own, and what only follows from a stop."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tpunb import rundir
from tpunb.models import RunSpec
from tpunb.worker import outcome
from tpunb.worker.outcome import Exit, Observed, Stop, Why

SPEC = RunSpec("id", "n", 2, "CPU", "/", (), ())
LOST = {
    "type": "PeerLostError", "message": "rank 0 ended while rank 1 waited in all_reduce",
    "cell": None, "line": None, "traceback": "", "source": (), "cell_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("why", "after", "state", "failures"),
    [
        ("interrupt", 0.1, "interrupted", 0),  # the other rank had its signal, and ended, earlier
        ("timeout", 0.1, "timed_out", 0),
        ("interrupt", -0.1, "failed", 1),
        ("peer", 0.1, "failed", 1),
    ],
)
def test_a_rank_that_loses_the_others_by_the_stop_has_not_failed(
    tmp_path: Path, why: Why, after: float, state: str, failures: int
) -> None:
    run = rundir.create(tmp_path, "n")
    now = time.time()
    run.error(0, 1).parent.mkdir(parents=True, exist_ok=True)
    rundir.write_json(run.error(0, 1), {**LOST, "time": now + after})
    exits = [
        Exit(0, 11, 130, now + 0.05, sent=frozenset({"SIGINT"})),
        Exit(1, 12, 1, now + 0.2, sent=frozenset({"SIGINT"})),
    ]
    seen = Observed(now - 9, now + 1, exits, Stop(why, "enough", now), 0, None, None)
    result = outcome.compose(run, SPEC, seen)
    assert (result.state, len(result.failures)) == (state, failures)
