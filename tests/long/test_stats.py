"""More of tests/xla/rehearsal/test_stats.py, which takes longer."""

from __future__ import annotations

import json

from tests.support import Driver
from tests.xla.rehearsal.test_stats import TRAIN
from tpunb.display.status import RunStatus
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult


def test_collective_stats_in_result_log_and_card(driver: Driver) -> None:
    # Far longer than the ranks' starts differ on a busy machine.
    result = driver.run([], TRAIN.format(seconds=2), ranks=2).result
    assert result.state == "succeeded"
    counted = {(row.rank, row.operation): row for row in result.collectives}
    for rank in (0, 1):
        assert counted[rank, "all_reduce sum"].calls == 4
        assert counted[rank, "all_reduce sum"].bytes == 4 * 100 * 4
        assert counted[rank, "rendezvous"].bytes == 4
        assert counted[rank, "all_gather"].bytes == 20
        assert all(row.took > 0 for row in result.collectives)
    assert len(counted) == 6
    # Rank 1 waited while rank 0 slept.
    assert counted[1, "all_reduce sum"].waited > 0.2
    assert counted[1, "all_reduce sum"].waited > counted[0, "all_reduce sum"].waited
    kept = json.loads((result.dir / "result.json").read_text())
    first = kept["collectives"][0]
    assert (first["rank"], first["operation"], first["calls"]) == (0, "all_reduce sum", 4)
    assert RunResult.from_json(kept, result.dir).collectives == result.collectives
    assert "each rank: 6 collectives, 1.6 kB (4 all_reduce sum, " in str(result)
    assert "rehearsal on CPU" in str(result)
    log = (result.dir / "run.log").read_text().splitlines()
    assert log[0] == "[tpunb] rehearsal on CPU: this run uses no TPU"
    status = RunStatus(RunDir(result.dir).read_spec(), "runs/x", clock=lambda: 0.0)
    status.end(result)
    assert "rehearsal on CPU" in status.text()
    assert "6 collectives, 1.6 kB" in status.html()


def test_collective_stats_of_failed_ranks_and_of_a_single_rank(driver: Driver) -> None:
    failed = driver.run([], TRAIN.format(seconds=0) + "\nraise ValueError('late')", ranks=2).result
    assert failed.state == "failed"
    assert failed.failure is not None
    # The other rank may have been stopped before it was done.
    first = {row.operation: row for row in failed.collectives if row.rank == failed.failure.rank}
    assert first["rendezvous"].calls == 1
    alone = driver.run([], TRAIN.format(seconds=0), ranks=1).result
    assert alone.state == "succeeded"
    assert alone.collectives == ()
    assert "collectives" not in repr(alone)
