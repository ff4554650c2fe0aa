"""Values that runs returned to the kernel, by cell, in the form for later runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpunb.kernel.returned import Returned, ReturnedRun
from tpunb.notebook.models import Cell, EarlierRun
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState


@pytest.fixture
def record() -> Returned:
    return Returned()


def ended(
    folder: Path,
    state: RunState = RunState.SUCCEEDED,
    failed: dict[str, str] | None = None,
    **got: Any,
) -> RunResult:
    """A run that has ended, with values of `--returns`."""
    folder.mkdir(exist_ok=True)
    result = RunResult(state, "n", 2, "CPU", 1.0, 2.0, folder)
    RunDir(folder).write_result(result)
    return replace(result, returns=got, returns_failed=failed or {})


CELL = Cell(3, "code", "%%tpu_train", 8, executions=(5, 8))


def delivery(folder: Path, number: int, *returns: str, **options: Any) -> ReturnedRun:
    return ReturnedRun(number, RunDir(folder), returns, options.pop("out", None), **options)


def test_returned_values_and_failures_of_a_cell(record: Returned, tmp_path: Path) -> None:
    run = record.add(delivery(tmp_path / "a", 8, "x", "y", out="r"))
    record.add(delivery(tmp_path / "other", 7, "z"))
    run.bind(ended(tmp_path / "a", x=1, failed={"y": "it cannot be pickled"}))
    [(index, values)] = record.by_cell([CELL]).items()
    assert (index, values.runs) == (3, (EarlierRun(str(tmp_path / "a"), ("x",), "r"),))
    assert values.names == {"x", "r"}
    assert {name: (why.why, why.instead) for name, why in values.absent.items()} == {
        "y": ("which could not return it (it cannot be pickled)", "run that cell again")
    }


def test_rerun_replaces_only_values_it_returned_again(record: Returned, tmp_path: Path) -> None:
    record.add(delivery(tmp_path / "a", 5, "x", "y", out="r")).bind(ended(tmp_path / "a", x=1, y=2))
    second = record.add(delivery(tmp_path / "b", 8, "x", "y", out="r"))
    second.bind(ended(tmp_path / "b", RunState.FAILED, failed={"x": "no", "y": "no"}))
    values = record.by_cell([CELL])[3]
    assert values.runs == (
        EarlierRun(str(tmp_path / "a"), ("x", "y")),
        EarlierRun(str(tmp_path / "b"), (), "r"),  # the values that the kernel has
    )
    assert not values.absent
    record.add(delivery(tmp_path / "c", 8, "x", "y", out="r")).bind(ended(tmp_path / "c", x=1, y=2))
    assert record.by_cell([CELL])[3].runs == (EarlierRun(str(tmp_path / "c"), ("x", "y"), "r"),)


def test_background_run_returns_values_after_wait(record: Returned, tmp_path: Path) -> None:
    options = {"out": "h", "background": True, "raises": False}
    run = record.add(delivery(tmp_path / "a", 8, "x", **options))
    (tmp_path / "a").mkdir()
    values = record.by_cell([CELL])[3]
    assert values.runs == ()
    assert values.absent.keys() == {"x", "h"}
    assert values.absent["h"].instead == "wait for it with `h.wait()`"

    result = ended(tmp_path / "a", x=1)
    values = record.by_cell([CELL])[3]
    run_ended = EarlierRun(str(tmp_path / "a"), (), "h", handle=True, raises=False)
    assert values.runs == (run_ended,)
    assert {name: why.instead for name, why in values.absent.items()} == {"x": "call `h.wait()`"}
    run.bind(result)  # as `h.wait()` does
    values = record.by_cell([CELL])[3]
    assert (values.runs, values.absent) == ((replace(run_ended, names=("x",)),), {})


def test_detached_run_returns_nothing_without_attach(record: Returned, tmp_path: Path) -> None:
    record.add(delivery(tmp_path / "a", 8, "x", detached=True))
    ended(tmp_path / "a", x=1)
    values = record.by_cell([CELL])[3]
    assert (values.runs, values.absent["x"].instead) == ((), "run `%tpu_attach a`")


def test_returned_values_of_a_removed_run_folder_are_absent(
    record: Returned, tmp_path: Path
) -> None:
    run = record.add(delivery(tmp_path / "a", 8, "x"))
    run.bind(ended(tmp_path / "a", x=1))
    (tmp_path / "a" / "result.json").unlink()
    values = record.by_cell([CELL])[3]
    assert values.runs == ()
    assert "no longer exists" in values.absent["x"].why
