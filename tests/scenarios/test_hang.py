"""Runs in which nothing goes on any more, and runs that only look like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import Driver
from tpunb.errors import RunHungError
from tpunb.runs.events import Phase
from tpunb.runs.spec import FailureKind, PhaseKind, Stop, StopCause

RANK = "import os, time, torch, torch_xla\nrank = int(os.environ['RANK'])"
LOOP = """\
import os, time, torch, torch_xla
import torch_xla.core.xla_model as xm
rank, device = int(os.environ["RANK"]), torch_xla.device()
for step in range(5):
    total = xm.all_reduce("sum", torch.ones(3, device=device))
    torch_xla.sync()
    if rank == 1 and step == 3:
        {one}
print("done", rank)
"""

# Hang time-outs here are some seconds: ranks on a busy machine need more than one to begin.


def stacks(folder: Path, rank: int) -> str:
    return (folder / "attempts" / "0" / str(rank) / "stacks.txt").read_text()


def test_hang_names_the_waiting_ranks_and_the_missing_rank(driver: Driver) -> None:
    seen = driver.run([], LOOP.format(one="time.sleep(1000)"), ranks=3, hang_timeout=6.0, grace=1.0)
    result = seen.result
    assert (result.state, result.returncode) == ("hung", 124)
    text = result.explain()
    assert text.startswith("no activity from any rank for 6 s")
    assert "ranks 0, 2: in xm.all_reduce, cell [1], line 5: total = xm.all_reduce(" in text
    assert "\nrank 1: at cell [1], line 8: time.sleep(1000)\nranks 0, 2: " in text
    assert "--hang-timeout" in text
    assert result.failure is not None
    assert (result.failure.kind, result.failure.cell, result.failure.line) == (
        FailureKind.HANG,
        1,
        8,
    )
    with pytest.raises(RunHungError, match="rank 1: at cell"):
        result.raise_for_failure()
    for rank in range(3):
        assert "script.py" in stacks(result.dir, rank)
    assert PhaseKind.COLLECTING_STACKS in [phase.kind for phase in seen.of(Phase)]
    assert result.stop == Stop(StopCause.HUNG)
    assert driver.run([], "print('next')").result.state == "succeeded"


SILENT_WORK = """\
import os, threading, time, torch, tpunb
for _ in tpunb.track(range(10)):
    time.sleep(0.5)

def compute(seconds=4):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

compute()
sync = os.fsync
os.fsync = lambda fd: (time.sleep(4), sync(fd))
tpunb.save({"weight": torch.ones(3)}, 1, path="elsewhere")
values = torch.ones(3)
threading.Thread(target=compute).start()  # the process ends when it does
"""
