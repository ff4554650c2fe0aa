"""Ranks that are started again after a failure."""

from __future__ import annotations

import pytest

from tests.support import Driver
from tpunb.runs.events import Note, RanksStarted

TRAIN = """
    import os, time, torch, torch_xla, tpunb
    import torch_xla.core.xla_model as xm
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(attempt * 2, 6):
        total = xm.all_reduce("sum", torch.ones(1, device="xla")).item()
        tpunb.log(step=step, total=total, attempt_=attempt)
        if rank == 1 and attempt < 2 and step == 3:
            {fail}
    print("through", rank, attempt)
"""


@pytest.mark.parametrize(
    ("fail", "said", "replicate"),
    [
        ("raise ValueError('odd')", "rank 1 failed in cell [2], line 8: ValueError: odd", None),
        ("os.kill(os.getpid(), 9)", "rank 1 was killed with SIGKILL", "asked for"),
    ],
    ids=["exception", "SIGKILL"],
)
def test_retry_restarts_all_ranks_after_a_failure(
    driver: Driver, fail: str, said: str, replicate: str | None
) -> None:
    seen = driver.run(["kept = 1"], TRAIN.format(fail=fail), retries=3, replicate=replicate)
    assert (seen.result.state, seen.result.attempts) == ("succeeded", 3)
    assert seen.result.failures == ()
    notes = [note.text for note in seen.of(Note) if "starting again" in note.text]
    assert len(notes) == 2
    assert notes[0].startswith(said)
    assert notes[0].endswith("starting again (retry 1 of 3)")
    assert [len(event.pids) for event in seen.of(RanksStarted)] == [2, 2, 2]
    assert [line for line in seen.log if "through" in line and " 2" in line] != []
    frame = seen.result.metrics()
    assert not frame.duplicated(["step", "rank"]).any()
    # A rank that dies without Python's knowing may lose what it recorded last.
    assert set(frame["step"]) == set(range(6))
    assert set(frame["total"]) == {2.0}
    assert max(frame["attempt_"]) == 2.0


def test_retry_limit_reached_reports_the_last_failure(driver: Driver) -> None:
    seen = driver.run([], TRAIN.format(fail="raise ValueError(attempt)"), retries=1)
    assert (seen.result.state, seen.result.attempts) == ("failed", 2)
    assert seen.result.failure is not None
    assert seen.result.failure.message == "1"
    # A cell without retries fails at once, as ever.
    seen = driver.run([], TRAIN.format(fail="raise ValueError(attempt)"))
    assert (seen.result.state, seen.result.attempts) == ("failed", 1)
