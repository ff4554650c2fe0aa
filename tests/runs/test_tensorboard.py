"""TensorBoard's event files, read back with TensorBoard."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.drivers.kernel import until
from tpunb.runs import tensorboard
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric
from tpunb.runs.tensorboard import TensorBoardWriter


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tpunb-tensorboard"]


def write(run: RunDir, ranks: int, metrics: Iterable[Metric]) -> TensorBoardWriter:
    made = TensorBoardWriter(run, ranks)
    for metric in metrics:
        made.add(metric)
    made.close()
    for thread in threads():
        thread.join()
    return made


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the data that TensorBoard finds in a folder."""
    found = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, round(event.value, 6)) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_tensorboard_writer_leaves_the_environment_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing tensorboardX sets a variable; a changed one makes kept preludes stale."""
    monkeypatch.delenv("CRC32C_SW_MODE", raising=False)
    for module in ("crc32c", "record_writer"):
        monkeypatch.delitem(sys.modules, f"tensorboardX.{module}", raising=False)
    write(RunDir(tmp_path), 1, [Metric(0, 1, {"loss": 1.0})])
    assert curves(tmp_path) == {"loss": [(1, 1.0)]}
    assert "CRC32C_SW_MODE" not in os.environ


def test_one_curve_for_all_ranks_reduced_as_asked(tmp_path: Path) -> None:
    metrics = [
        Metric(rank, step, {"loss": step + rank, "n": 2.0, "eval/acc": 0.5}, {"n": "sum"}, 100.0)
        for rank in (0, 1)
        for step in (1, 2)
    ]
    metrics += [Metric(0, 3, {"loss": 7.0}, {}, 200.0), Metric(0, None, {"lr": 0.5})]
    metrics += [Metric(rank, None, {"lr": 0.25 * rank}) for rank in (0, 1)]
    write(RunDir(tmp_path), 2, metrics)
    assert curves(tmp_path) == {
        "loss": [(1, 1.5), (2, 2.5), (3, 7.0)],  # of step 3 one rank has told
        "n": [(1, 4.0), (2, 4.0)],
        "eval/acc": [(1, 0.5), (2, 0.5)],
        "lr": [(0, 0.375), (1, 0.0)],
    }
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [event.wall_time for event in found.Scalars("loss")] == [100.0, 100.0, 200.0]


def test_a_loss_that_is_not_finite_is_written_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(RunDir(tmp_path), 1, [Metric(0, 1, {"loss/a b": float("inf")})])
    assert curves(tmp_path) == {"loss/a b": [(1, float("inf"))]}
    assert caplog.text == ""


def test_steps_that_a_retry_repeats_count_once(tmp_path: Path) -> None:
    metrics = [Metric(0, step, {"loss": 1.0}) for step in range(5)]
    metrics += [Metric(0, step, {"loss": 2.0}, attempt=1) for step in range(3, 7)]
    write(RunDir(tmp_path), 1, metrics)
    assert curves(tmp_path)["loss"] == [(step, 1.0 + (step >= 3)) for step in range(7)]


def test_tensorboard_file_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = [Metric(0, 1, {"loss": 1.0})]
    made = write(RunDir(tmp_path / "removed"), 1, metrics)
    assert made.problem == "No such file or directory"
    monkeypatch.setitem(sys.modules, "tensorboardX.record_writer", None)
    assert write(RunDir(tmp_path), 1, metrics).problem.startswith("ModuleNotFoundError: ")


def test_tensorboard_file_is_written_by_one_follower_at_a_time(tmp_path: Path) -> None:
    run, metrics = RunDir(tmp_path), [Metric(0, 1, {"loss": 1.0})]
    with open(tmp_path / ".board.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert write(run, 1, metrics).problem == ""
    assert list(tmp_path.glob("events.*")) == []
    write(run, 1, metrics)
    write(run, 1, [*metrics, Metric(0, 2, {"loss": 3.0})])
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert curves(tmp_path) == {"loss": [(1, 1.0), (2, 3.0)]}


def test_tensorboard_file_is_readable_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "SETTLED", 0.0)
    monkeypatch.setattr(tensorboard, "EVERY", 0.01)
    made = TensorBoardWriter(RunDir(tmp_path), 2)
    made.add(Metric(0, 1, {"loss": 1.0}))
    wait_for: Callable[[], bool] = lambda: curves(tmp_path).get("loss") == [(1, 1.0)]  # noqa: E731
    until(wait_for, "the value of the only rank that has logged")
    made.close()
    for thread in threads():
        thread.join()
