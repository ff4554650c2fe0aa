"""More of tests/scenarios/test_checkpoint_faults.py, which takes longer."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.scenarios.test_checkpoint_faults import child
from tpunb.training.checkpoint.api import load, save

pytestmark = pytest.mark.usefixtures("outside_run")


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(("ranks", "kills"), [(1, 120), (2, 40)])
def test_load_finds_the_newest_complete_checkpoint_after_kills(
    ranks: int, kills: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each attempt saves until it is killed; what it had finished must be there, as it was.

    Two ranks save parts, and are killed one after the other.
    """
    dice = random.Random(500)
    monkeypatch.setenv("TPUNB_RUN", os.path.abspath("run"))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    last, torn, span = -1, 0, 0.01
    for attempt in range(kills):
        begins, begun = os.pipe()
        reads, writes = os.pipe()

        monkeypatch.setenv("TPUNB_ATTEMPT", str(attempt))

        def work(rank: int, first: int = last + 1, begun: int = begun, told: int = writes) -> None:
            os.environ["RANK"] = str(rank)
            for step in range(first, first + 1000):
                state = {"x": np.full(3_000, step), "parts": [torch.full((500,), step)] * 3}
                os.write(begun, b".")
                save(state, step, per_rank=ranks > 1)
                os.write(told, f"{rank} {step}\n".encode())

        with contextlib.ExitStack() as stack:
            pids = [stack.enter_context(child(partial(work, rank))) for rank in range(ranks)]
            for _ in pids:
                os.read(begins, 1)
            time.sleep(dice.uniform(0, span))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        for end in (begins, begun, writes):
            os.close(end)
        with open(reads) as lines:
            told = [(int(rank), int(step)) for rank, step in map(str.split, lines)]
        done = [max((s for r, s in told if r == rank), default=last) for rank in range(ranks)]
        torn += len(list(Path("run/checkpoints").glob(".*.tmp")))
        # About as long as saves take on this machine now: some end, some do not.
        span *= 0.8 if min(done) > last else 1.25

        monkeypatch.setenv("TPUNB_ATTEMPT", "1000000")
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            found = load()
            if found is None:
                assert min(done) == -1
                continue
            # A save may have been whole when the kill came and not have told.
            assert min(done) <= found.step <= min(done) + 1, (
                told,
                done,
                sorted(os.listdir("run/checkpoints")),
            )
            assert (found["x"] == found.step).all()
            assert all((part == found.step).all() for part in found["parts"])
            assert rank == 0 or found.step == last
            last = found.step
        assert "cut off" not in capsys.readouterr().err
    assert last > 10  # some attempts did save,
    assert torn > 30  # and some were killed in the middle
    monkeypatch.setenv("RANK", "0")
    for path in Path("run/checkpoints").glob(".*.tmp"):
        os.utime(path, (0, 0))
    save("the last", last + 1)
    assert not list(Path("run/checkpoints").glob(".*.tmp"))
