"""`tpunb.log`: what it accepts, what it writes, and that it never waits for the device."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.drivers.ranks import Ranks
from tpunb.runs.metrics import read_rows
from tpunb.training import log as logging
from tpunb.training.log import flush_metrics, log


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The environment of rank 1 in its second attempt."""
    monkeypatch.setenv("TPUNB_RUN", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TPUNB_ATTEMPT", "2")
    logging._drop_writer()
    yield tmp_path
    flush_metrics()
    logging._drop_writer()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TPUNB_RUN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    logging._drop_writer()
    yield
    logging._drop_writer()


def written(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_logged_number_is_in_the_file_at_once(run: Path) -> None:
    before = time.time()
    log(3, loss=0.5, accuracy=1)
    (record,) = written(run)
    assert before <= record.pop("time") <= time.time()
    assert record == {"rank": 1, "attempt": 2, "step": 3, "loss": 0.5, "accuracy": 1.0}


def test_numpy_and_bool_values_are_logged_as_numbers(run: Path) -> None:
    log(
        step=np.int64(4),
        flag=True,
        numpy_flag=np.bool_(False),
        single=np.float32(0.25),
        array=np.array(7),
        one=np.array([8]),
    )
    log(loss=2)
    flush_metrics()
    first, second = written(run)
    assert first.items() >= {"step": 4, "flag": 1.0, "numpy_flag": 0.0, "single": 0.25}.items()
    assert first.items() >= {"array": 7.0, "one": 8.0}.items()
    assert second["step"] is None


def test_tensors_on_the_cpu(run: Path) -> None:
    import torch

    weight = torch.tensor(1.5, requires_grad=True)
    log(1, weight=weight * 2, count=torch.tensor([3]), half=torch.tensor(0.5, dtype=torch.bfloat16))
    (record,) = written(run)
    assert record.items() >= {"weight": 3.0, "count": 3.0, "half": 0.5}.items()


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ({"loss": "0.5"}, TypeError, "loss is str, not a number or a tensor of one element"),
        ({"loss": None}, TypeError, "loss is NoneType"),
        ({"loss": 1j}, TypeError, "loss is complex"),
        ({"loss": [1.0]}, TypeError, "loss is list"),
        ({"loss": np.ones(2)}, ValueError, r"loss is an array of shape \[2\].* loss.mean\(\)"),
        ({"loss": np.array("x")}, TypeError, "loss is str"),
        ({"rank": 1}, ValueError, "'rank' is reserved"),
        ({"time": 1}, ValueError, "'time' is reserved"),
        ({"attempt": 1}, ValueError, "'attempt' is reserved"),
        ({}, TypeError, "at least one value"),
        (
            {"loss": 1, "reduce": "median"},
            ValueError,
            r"unknown reduce='median' for loss: use 'mean', 'sum', 'min', 'max'",
        ),
        ({"loss": 1, "reduce": {"tokens": "sum"}}, ValueError, "names tokens, which this call"),
        ({"step": 1.5, "loss": 1}, TypeError, "step must be an int, not float"),
        ({"step": "3", "loss": 1}, TypeError, "step must be an int, not str"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    run: Path, values: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        log(**values)
    flush_metrics()
    assert not (run / "metrics.jsonl").exists()


def test_bad_tensors_are_refused() -> None:
    import torch

    with pytest.raises(ValueError, match=r"loss is a tensor of shape \[2, 3\].*loss.mean\(\)"):
        log(1, loss=torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"loss is complex: log its abs\(\)"):
        log(1, loss=torch.tensor(1j))
    with pytest.raises(TypeError, match="step must be an int, not a tensor"):
        log(torch.tensor(1), loss=1.0)


def test_reductions_are_recorded(run: Path) -> None:
    log(1, loss=0.5, reduce="mean")
    log(1, tokens=3, slowest=2.0, reduce={"tokens": "sum", "slowest": "max"})
    log(1, a=1, b=2, reduce="min")
    flush_metrics()
    assert [record.get("reduce") for record in written(run)] == [
        None,
        {"tokens": "sum", "slowest": "max"},
        {"a": "min", "b": "min"},
    ]


def test_nan_and_infinity_can_be_read_back(run: Path) -> None:
    log(1, a=math.nan, b=math.inf, c=-math.inf)
    (record,) = written(run)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)
    frame = pd.DataFrame(written(run))
    assert frame["a"].isna().all()
    assert frame["b"].tolist() == [math.inf]


def test_several_threads_may_log(run: Path) -> None:
    def work(number: int) -> None:
        for step in range(300):
            log(step, **{f"thread{number}": step})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flush_metrics()
    for number in range(4):
        rows = [r for r in written(run) if f"thread{number}" in r]
        assert [r["step"] for r in rows] == [r[f"thread{number}"] for r in rows] == [*range(300)]


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").mkdir()
    logging._reported.clear()
    for step in range(3):
        log(step, loss=1.0)
    flush_metrics()
    complaint = capsys.readouterr().err
    assert complaint.count("tpunb.log: ") == 1
    assert "cannot write " in complaint


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The free bytes of the disk; stderr is on the same disk, and fails when it is full."""
    free = [10**9]
    append = logging.append_lines

    def append_lines(path: Path, data: bytes) -> int:
        if not free[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: free[0]]
        free[0] -= len(part)
        return append(path, part)

    class Stderr:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None:
            self.write("")

    monkeypatch.setattr(logging, "append_lines", append_lines)
    monkeypatch.setattr(logging, "RETRY", 0.0)
    monkeypatch.setattr(sys, "stderr", Stderr())
    logging._reported.clear()
    yield free
    free[0] = 10**9


def test_full_disk_records_are_written_later(run: Path, disk: list[int]) -> None:
    log(0, loss=0.0)
    disk[0] = 10  # the half of a line
    for step in range(1, 200):
        log(step, loss=float(step))
        if step == 100:
            assert not threading.Event().wait(2 * logging.GATHER)
            disk[0] = 10**9
    flush_metrics()
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(200))


@pytest.mark.parametrize("count", [1, 100], ids=["by the caller", "by the thread"])
def test_full_disk_until_the_end_does_not_block(
    run: Path, disk: list[int], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    disk[0] = 0
    for step in range(count):
        log(step, loss=1.0)
    flush_metrics()
    monkeypatch.undo()  # stderr takes lines again
    assert not (run / "metrics.jsonl").exists()


def test_records_for_a_full_disk_have_a_limit(
    run: Path, disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "MOST_KEPT", 1000)
    disk[0] = 0
    for step in range(100):
        log(step, loss=1.0)
    disk[0] = 10**9
    flush_metrics()
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    assert steps[:5] == [0, 1, 2, 3, 4]
    assert len(steps) < 20


def test_writer_thread_error_does_not_block(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logging._reported.clear()

    def resolve(self: logging.Record) -> None:
        if self.step == 3:
            raise ZeroDivisionError("odd")

    monkeypatch.setattr(logging.Record, "resolve", resolve)
    log(0, loss=1.0)
    log(3, loss=1.0)
    flush_metrics()
    log(4, loss=1.0)
    flush_metrics()
    assert 4 in [row["step"] for row in written(run)]
    assert "tpunb.log: lost 1 records: odd" in capsys.readouterr().err


def test_outside_a_run_a_line_is_printed(kernel: None, capsys: pytest.CaptureFixture[str]) -> None:
    log(3, loss=0.41234, acc=0.91)
    log(loss=12345.678, count=100000, none=math.nan, much=math.inf, tiny=1.5e-7)
    assert capsys.readouterr().out.splitlines() == [
        "step 3 · loss 0.4123 · acc 0.91",
        "loss 12345.7 · count 100000 · none nan · much inf · tiny 1.5e-07",
    ]


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_under_torchrun_without_a_run_rank_0_prints(
    kernel: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    lines: int,
) -> None:
    monkeypatch.setenv("RANK", rank)
    log(1, loss=0.5)
    assert len(capsys.readouterr().out.splitlines()) == lines


@pytest.mark.usefixtures("starts_processes")
def test_all_records_are_written_at_the_end_without_importing_torch(tmp_path: Path) -> None:
    program = (
        "import sys, tpunb\nfor step in range(500): tpunb.log(step, loss=0.5)\n"
        "assert not {'torch', 'numpy', 'pandas'} & set(sys.modules)"
    )
    env = {**os.environ, "TPUNB_RUN": str(tmp_path), "RANK": "0"}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    assert len(written(tmp_path)) == 500


# Functions without `test_` run in a process that has torch_xla.


def count(metric: str) -> int:
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    xm.wait_device_ops()  # a step is counted at its end, and sync() does not wait for it
    return (met.metric_data(metric) or (0,))[0]


def lazy(folder: str) -> dict[str, Any]:
    import torch
    import torch_xla

    device = torch_xla.device()
    weight = torch.ones(8, device=device, requires_grad=True)
    torch_xla.sync(wait=True)
    executions, transfers = count("ExecuteTime"), count("TransferFromDeviceTime")
    loss = (weight * 3).sum()
    log(1, loss=loss, flag=loss > 3, half=loss.bfloat16())
    log(2, plain=2.0)  # stays behind the first
    during = (count("ExecuteTime"), count("TransferFromDeviceTime")) == (executions, transfers)
    nothing_yet = not os.path.exists(f"{folder}/metrics.jsonl")
    torch_xla.sync()
    log(3, plain=3.0)
    flush_metrics()
    return {
        "no computation by log": during,
        "nothing before the step": nothing_yet,
        "one computation": count("ExecuteTime") - executions,
        "written": written(Path(folder)),
    }


def test_lazy_tensors_are_read_after_their_step(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.values(lazy, 1, str(tmp_path), TPUNB_RUN=str(tmp_path))
    assert found["no computation by log"]
    assert found["nothing before the step"]
    assert found["one computation"] == 1
    records = [{k: v for k, v in r.items() if k != "time"} for r in found["written"]]
    origin = {"rank": 0, "attempt": 0}
    assert records == [
        {**origin, "step": 1, "loss": 24.0, "flag": 1.0, "half": 24.0},
        {**origin, "step": 2, "plain": 2.0},
        {**origin, "step": 3, "plain": 3.0},
    ]
    times = [r["time"] for r in found["written"]]
    assert times == sorted(times)


def changed_later(folder: str) -> tuple[list[dict[str, Any]], int]:
    import torch
    import torch_xla

    device = torch_xla.device()
    total = torch.zeros((), device=device)
    torch_xla.sync()
    for step in range(4):
        loss = torch.full((), float(step), device=device) + 1
        log(step, loss=loss)
        loss /= 2  # after it was logged
        total += loss.detach()
        log(step, total=total)
        torch_xla.sync()  # the memory of the old total is used for the new one
    with torch.inference_mode():
        accuracy = torch.ones(4, device=device).mean()
        log(9, accuracy=accuracy)
    flush_metrics()
    data = torch.ones(4, device=device)
    torch_xla.sync()
    before = count("CompileTime")
    for step in range(6):
        loss = (data * data).sum()
        if step % 2 == 0:
            log(step, again=loss)
        torch_xla.sync()
    flush_metrics()
    return written(Path(folder)), count("CompileTime") - before


def test_the_value_is_that_at_the_call_and_costs_no_other_graph(
    ranks: Ranks, tmp_path: Path
) -> None:
    ((records, compilations),) = ranks.values(
        changed_later, 1, str(tmp_path), TPUNB_RUN=str(tmp_path)
    )
    assert [r["loss"] for r in records if "loss" in r] == [1.0, 2.0, 3.0, 4.0]
    assert [r["total"] for r in records if "total" in r] == [0.5, 1.5, 3.0, 5.0]
    assert [r["accuracy"] for r in records if "accuracy" in r] == [1.0]
    assert [r["again"] for r in records if "again" in r] == [4.0, 4.0, 4.0]
    assert compilations == 1


def ending(folder: str, how: str) -> list[float]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    log(1, loss=torch.ones((), device=device))
    if how == "a closure of the user fails":
        xm.add_step_closure(lambda: 1 // 0)
        log(2, loss=torch.ones((), device=device))
        with pytest.raises(ZeroDivisionError):
            torch_xla.sync()
    log(3, plain=2.0)
    if how == "failed":
        executions = count("ExecuteTime")
        flush_metrics(sync=False)
        assert count("ExecuteTime") == executions
    else:
        log(4, loss=torch.ones((), device=device))
        flush_metrics()
    return [r["step"] for r in written(Path(folder))]


@pytest.mark.parametrize(
    ("how", "steps"),
    [("succeeded", [1, 3, 4]), ("failed", [3]), ("a closure of the user fails", [1, 2, 3, 4])],
)
def test_flush_at_the_end_of_a_rank(
    ranks: Ranks, tmp_path: Path, how: str, steps: list[int]
) -> None:
    assert ranks.values(ending, 1, str(tmp_path), how, TPUNB_RUN=str(tmp_path)) == [steps]


def lost(folder: str) -> tuple[bool, str]:
    import contextlib
    import io

    import torch
    import torch_xla

    from tpunb.training.log import Record

    value = torch.zeros((), device=torch_xla.device())
    torch_xla.sync()
    record = Record(0.0, 7)
    record.add("total", value)
    value += 1  # its first change in place, after it was logged: nothing told of it
    torch_xla.sync(wait=True)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        record.resolve()
    return math.isnan(record.values["total"]), stderr.getvalue()


def test_a_lost_value_is_nan_and_reported(ranks: Ranks, tmp_path: Path) -> None:
    ((is_nan, complaint),) = ranks.values(lost, 1, str(tmp_path))
    assert is_nan
    assert complaint.startswith("tpunb.log: lost the value of total (step 7): ")


def printed() -> None:
    import torch
    import torch_xla

    log(1, loss=torch.ones((), device=torch_xla.device()) / 4)
    print("before the step marker", flush=True)
    torch_xla.sync()
    print("after it", flush=True)


def test_in_a_kernel_a_lazy_value_is_printed_at_the_step_marker(ranks: Ranks) -> None:
    (ended,) = ranks.run(printed, 1)
    assert ended.output.splitlines() == [
        "before the step marker",
        "step 1 · loss 0.25",
        "after it",
    ]


def forked() -> list[str]:
    log(1, loss=1.0)
    log(2, loss=2.0)  # the thread is running now
    assert "tpunb.log" in [thread.name for thread in threading.enumerate()]
    pid = os.fork()
    if pid == 0:
        log(3, loss=3.0)
        log(4, loss=4.0)
        flush_metrics()
        os._exit(0)
    os.waitpid(pid, 0)
    flush_metrics()
    return sorted(r["step"] for r in written(Path(os.environ["TPUNB_RUN"])))


def test_a_child_process_logs_as_well(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(forked, 1, TPUNB_RUN=str(tmp_path)) == [[1, 2, 3, 4]]
