"""`tpunb.on_log`: the values that callbacks get, and that callbacks cannot harm a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tpunb
from tests.support import Driver
from tpunb.runs import callbacks
from tpunb.runs.callbacks import RunCallbacks
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric, Output

Got = list[tuple[dict[str, float], int | None]]


@pytest.fixture
def got() -> Iterator[Got]:
    """The calls of a callback."""
    got: Got = []
    tpunb.on_log(lambda values, step: got.append((values, step)))
    yield got
    tpunb.on_log(None)
    callbacks._passed_on.clear()


def passed_on(folder: Path, ranks: int, *metrics: Metric) -> RunCallbacks:
    made = RunCallbacks(RunDir(folder), ranks)
    for metric in metrics:
        made.add(metric)
    made.finish()
    return made


def test_callback_gets_each_step_reduced_over_all_ranks(got: Got, tmp_path: Path) -> None:
    logged = [
        Metric(rank, step, {"loss": step + rank, "n": 1.0}, {"n": "sum"})
        for step in (1, 2)
        for rank in (0, 1)
    ]
    made = passed_on(tmp_path, 2, *logged, Metric(0, 3, {"lr": 0.1}))
    assert got == [({"loss": 1.5, "n": 2.0}, 1), ({"loss": 2.5, "n": 2.0}, 2), ({"lr": 0.1}, 3)]
    assert made.problem == ""


def test_callback_gets_only_new_steps_when_followed_again(got: Got, tmp_path: Path) -> None:
    logged = [Metric(0, step, {"loss": float(step)}) for step in range(4)]
    passed_on(tmp_path, 1, *logged[:2])
    passed_on(tmp_path, 1, *logged, Metric(0, 2, {"loss": 9.0}, attempt=1))
    assert [step for _, step in got] == [0, 1, 2, 3, 2]
    passed_on(tmp_path / "another", 1, logged[0])
    assert [step for _, step in got][5:] == [0]


def test_callback_exception_is_reported_and_ends_nothing(got: Got, tmp_path: Path) -> None:
    def fails(values: dict[str, float], step: int | None) -> None:
        raise ConnectionError("no network")

    tpunb.on_log(fails)
    made = passed_on(tmp_path, 1, *(Metric(0, step, {"loss": 1.0}) for step in range(3)))
    assert len(got) == 3
    assert made.problem.endswith("fails failed: ConnectionError: no network")


def test_callback_in_the_kernel_gets_each_step_once_in_a_rank_its_own(
    got: Got, driver: Driver
) -> None:
    above = "import os, tpunb\ntpunb.on_log(lambda values, step: print('above', step))"
    train = (
        "rank = int(os.environ['RANK'])\n"
        "if rank == 1:\n    tpunb.on_log(lambda values, step: print('own', values, step))\n"
        "for step in range(3):\n    tpunb.log(step, loss=float(step + rank))"
    )
    seen = driver.run([above], train, ranks=2)
    assert seen.result.state == "succeeded", seen.log
    assert got == [({"loss": step + 0.5}, step) for step in range(3)]
    log = "".join(event.text for event in seen.of(Output))
    assert "above" not in log
    assert [line.partition("own ")[2] for line in log.splitlines() if "own " in line] == [
        f"{{'loss': {step + 1.0}}} {step}" for step in range(3)
    ]
