"""Stops at random moments, of every kind: none hangs, leaves a process, or half a checkpoint."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

import tpunb
from tests.support import Driver, left_below
from tpunb.kernel.launcher import Run
from tpunb.runs import state
from tpunb.runs.events import Ended, Metric, RanksStarted
from tpunb.runs.spec import Stop, StopCause
from tpunb.utils import processes

STOPS = int(os.environ.get("TPUNB_TEST_STOPS", "60"))
SEED = int(os.environ.get("TPUNB_TEST_SEED", "7"))
START, STEP = "after the start", "after the first step"
MOMENTS, WEIGHTS = [(START, 0.15), (START, 1.2), (STEP, 0.8)], [4, 2, 4]
"""After what a run is stopped, and how many seconds after it at last."""
PATIENCE = 100.0
KINDS = ("run", "folder", "twice", "at once", "SIGTERM")

PRELUDE = [
    "import os, time, torch, torch_xla, tpunb\nimport torch_xla.core.xla_model as xm",
    "table = [time.sleep(0.01) or i for i in range(10)]",
]
TRAIN = """
rank = int(os.environ["RANK"])
weight = torch.zeros(1000, device="xla")
try:
    for step in range(10_000):
        weight = weight + xm.all_reduce("sum", torch.ones(1, device="xla"))
        torch_xla.sync()
        tpunb.log(step=step, weight=weight[0])
        print("step", step)
        if step % 2 == 0:
            tpunb.save({"weight": weight}, step)
        else:
            tpunb.save({"rank": rank}, step, per_rank=True, path="parts")
except KeyboardInterrupt:
    if rank == 0:
        tpunb.save({"weight": weight}, step)
    raise
"""


def _stop(kind: str, run: Run, ranks: list[int], dice: random.Random) -> None:
    if kind == "run":
        run.stop(Stop(StopCause.USER, "enough"))
    elif kind == "folder":
        state.request_stop(run.dir, Stop(reason="enough"))
    elif kind == "twice":
        run.stop(Stop(StopCause.USER, "enough"))
        time.sleep(dice.random() * 0.1)
        run.stop(Stop(StopCause.USER, "again", now=True))
    elif kind == "at once":
        state.request_stop(run.dir, Stop(reason="enough", now=True))
    else:
        for pid in ranks:
            process = processes.find_process(pid)
            if process is not None:
                processes.send_signal(process, signal.SIGTERM)
        if not ranks:  # none has been started yet
            run.stop(Stop(StopCause.USER, "enough"))


def test_stops_at_random_moments(driver: Driver, tmp_path: Path) -> None:
    launcher, supervisor = driver.launcher, driver.supervisor_pid
    assert launcher.supervisor is not None
    dice = random.Random(SEED)
    whole = 0
    for number in range(STOPS):
        kind, ranks = dice.choice(KINDS), dice.choice((2, 3))
        start = dice.choice((None, "asked for"))
        # Many of them while it starts, where most happens at once; and many after the first step,
        # whenever that is on this machine: what they have saved is looked at.
        when, latest = dice.choices(MOMENTS, WEIGHTS)[0]
        moment = dice.uniform(0, latest)
        what = f"stop {number} (seed {SEED}): {kind}, {ranks} ranks, {start}, {moment:.3f} s {when}"
        run, _ = driver.start(
            PRELUDE, TRAIN, ranks=ranks, replicate=start, grace=2.0, cwd=str(tmp_path)
        )
        assert isinstance(run, Run)
        pids: list[int] = []
        late = threading.Timer(PATIENCE, run.stop, (StopCause.USER, what), {"now": True})
        late.start()
        due = time.monotonic() + moment if when == START else math.inf
        stopped = False
        for event in run.events():
            if isinstance(event, RanksStarted):
                pids = list(event.pids)
            if isinstance(event, Metric) and due == math.inf:
                due = time.monotonic() + moment
            if not stopped and time.monotonic() >= due:
                stopped = True
                _stop(kind, run, pids, dice)
            if event is not None and isinstance(event, Ended):
                break
        assert late.is_alive(), f"{what}: it hangs"
        late.cancel()
        result = run.result()
        what += f"\n{result.dir}\n{result.failures}"
        assert result.state == "interrupted", what
        assert result.reason == "enough" or kind == "SIGTERM", what
        assert result.failures == (), what
        while launcher.supervisor.busy:
            launcher.supervisor.poll()
        assert left_below(supervisor) == [], what
        newest = tpunb.load(result.dir)
        whole += newest is not None
        assert newest is None or len(newest["weight"]) == 1000, what
        parts = tmp_path / "parts"
        if parts.exists():
            for path in parts.iterdir():
                path.unlink()
    assert whole > STOPS / 5
    seen = driver.run(["a = 1"], "print(a)")
    assert seen.result.state == "succeeded"


@pytest.mark.parametrize("how", ["once", "hurried"])
def test_stops_while_a_run_starts(driver: Driver, how: str) -> None:
    """Before its processes are known, or ready: they are told all the same, and only stopped."""
    for number in range(25):
        run, _ = driver.start(["import time"], "time.sleep(600)", grace=1.0)
        assert isinstance(run, Run)
        time.sleep(number * 0.003)
        run.stop(Stop(StopCause.USER, "enough"))
        if how == "hurried":
            run.stop(Stop(StopCause.USER, "again", now=True))
        for _ in run.events():
            continue
        result = run.result()
        assert (result.state, result.failures) == ("interrupted", ()), f"{number}: {result}"


def test_failure_stays_although_the_exit_code_is_0(driver: Driver) -> None:
    seen = driver.run(
        ["import atexit, os"], "atexit.register(os._exit, 0)\nraise ValueError('odd')", ranks=1
    )
    failure = seen.result.failure
    assert seen.result.state == "failed"
    assert failure is not None
    assert (failure.rank, failure.type, failure.line) == (0, "ValueError", 2)
