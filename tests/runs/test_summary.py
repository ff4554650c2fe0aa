"""The summary of a run, from run folders."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support import Driver
from tpunb.runs import summary, trace
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.heartbeat import SIZE, Heartbeat
from tpunb.runs.result import RunResult, Summary
from tpunb.runs.spec import PhaseKind, Profile, RunSpec, RunState
from tpunb.utils.files import append_text


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 2 ranks and 100 s: 4 s before its prelude, 6 s of prelude, 88 s of training."""
    run = RunDir(tmp_path)
    for rank in (0, 1):
        run.attempt(0, rank).mkdir(parents=True)
    for kind, time in [
        (PhaseKind.STARTING, 1001.0),
        (PhaseKind.PRELUDE, 1004.0),
        (PhaseKind.PRELUDE, 1005.0),
        (PhaseKind.TRAINING, 1010.0),
        (PhaseKind.ENDED, 1098.0),
    ]:
        run.emit(Phase(kind, "", time=time))
    return run


def pulse(run: RunDir, rank: int, attempt: int = 0, **counts: int) -> None:
    memory = bytearray(SIZE)
    Heartbeat(**counts).pack_into(memory)
    run.heartbeat(attempt, rank).write_bytes(memory)


def summed(run: RunDir, **changes: Any) -> Summary:
    values: dict[str, Any] = {
        "state": "succeeded",
        "name": "n",
        "world_size": 2,
        "device": "CPU",
        "started": 1000.0,
        "ended": 1100.0,
        "dir": run.path,
    }
    return summary.summarize(RunResult(**(values | changes)))


def log(run: RunDir, *rows: dict[str, Any]) -> None:
    for row in rows:
        append_text(run.metrics, json.dumps({"rank": 0, "attempt": 0, "time": 1.0, **row}) + "\n")


def test_time_summary_of_a_run(run: RunDir) -> None:
    pulse(run, 0, compile_nanoseconds=10**9)
    pulse(run, 1, compile_nanoseconds=3 * 10**9)
    for seconds in (1.5, 2.5):
        append_text(run.saving(0, 0), f"{seconds}\n")
    spent = summed(run).spent
    assert spent == (
        ("start", 4.0),
        ("prelude", 6.0),
        ("compiling", 3.0),
        ("checkpoints", 4.0),
        ("training", 83.0),
    )
    assert sum(took for _, took in spent) == 100.0


def test_the_best_of_each_metric_over_all_ranks(run: RunDir) -> None:
    log(
        run,
        *(
            {"rank": rank, "step": step, "loss": rank + abs(step - 2)}
            for step in range(4)
            for rank in (0, 1)
        ),
    )
    assert [str(one) for one in summed(run).best] == ["best loss 0.5 (step 2)"]
    assert summed(run).advice == ()


def test_a_profile_without_a_trace_is_noted(run: RunDir) -> None:
    run.write_spec(RunSpec(run.id, "n", 2, "CPU", "/", (), (), profile=Profile((), 3, 4)))
    made = summed(run, state=RunState.SUCCEEDED)
    assert [advice.message for advice in made.advice] == ["--profile has no trace of steps 3 to 4"]
    assert not summed(run, state=RunState.FAILED).advice  # it may have ended before step 3
    folder = trace.session_of(run, Profile((), 3, 4))
    folder.mkdir(parents=True)
    (folder / "rank-0.xplane.pb").touch()
    made = summed(run, state=RunState.SUCCEEDED)
    assert made.trace.endswith(f"xprof --logdir {run.profile}")
    assert not made.advice


def test_advice_about_nan_metrics_and_recompilations(run: RunDir) -> None:
    log(
        run,
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": math.nan, "acc": math.nan},
        {"step": 3, "loss": math.nan, "acc": 0.5},
    )
    for attempt in (0, 1):
        run.attempt(attempt, 0).mkdir(parents=True, exist_ok=True)
        pulse(run, 0, attempt, steps=100, compilations_ended=30 * attempt)
    found = summed(run, attempts=2, device="TPU", ended=2000.0).advice
    assert [one.message for one in found] == [
        "loss is not a number from step 2 on",
        "30 programs were compiled in 100 steps",
        "succeeded on attempt 2",
    ]
    assert all(one.fix for one in found)
    spec = RunSpec("n", "n", 1, "TPU", "/", (), (), spmd=2)
    run.write_spec(spec)
    assert summed(run, attempts=2).advice[1].fix.startswith("fetch sharded tensors together")
    pulse(run, 0, steps=100, compilations_ended=20)
    assert len(summed(run, device="TPU", ended=2000.0).advice) == 1  # the metric


CPU_STEP = "torch.ones(2, requires_grad=True).sum().backward()"
XLA_STEP = "torch.ones(2, requires_grad=True, device='xla').sum().backward()"


@pytest.mark.parametrize(
    ("train", "noted"),
    [
        (CPU_STEP, True),
        (f"{CPU_STEP}\ntorch_xla.sync()", True),
        (f"{XLA_STEP}\ntorch_xla.sync()", False),
        (f"{CPU_STEP}\n{XLA_STEP}\ntorch_xla.sync()", False),
        (f"{XLA_STEP}\nraise SystemExit(1)", False),  # before anything is computed on the device
        ("torch.ones(2).sum().item()", False),  # data, or an evaluation
    ],
)
def test_a_training_that_does_not_use_the_device(driver: Driver, train: str, noted: bool) -> None:
    seen = driver.run(["import torch, torch_xla"], train)
    notes = [one.message for one in seen.result.summary.advice]
    assert notes == ["no rank used the device: each trained on the CPU"] * noted, seen.log
