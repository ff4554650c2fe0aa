"""What the kernel has got from its runs, by cell, as the record says it for later runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpunb.kernel.returned import Delivery, Returned
from tpunb.notebook.models import Cell, HandedRun
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


def delivery(folder: Path, number: int, *returns: str, **options: Any) -> Delivery:
    return Delivery(number, RunDir(folder), returns, options.pop("out", None), **options)


def test_what_a_cell_brought(record: Returned, tmp_path: Path) -> None:
    run = record.add(delivery(tmp_path / "a", 8, "x", "y", out="r"))
    record.add(delivery(tmp_path / "other", 7, "z"))
    run.bind(ended(tmp_path / "a", x=1, failed={"y": "it cannot be pickled"}))
    [(index, handed)] = record.by_cell([CELL]).items()
    assert (index, handed.runs) == (3, (HandedRun(str(tmp_path / "a"), ("x",), "r"),))
    assert handed.names == {"x", "r"}
    assert {name: (why.why, why.instead) for name, why in handed.absent.items()} == {
        "y": ("which could not return it (it cannot be pickled)", "run that cell again")
    }


def test_a_later_execution_replaces_what_it_brought_anew(record: Returned, tmp_path: Path) -> None:
    record.add(delivery(tmp_path / "a", 5, "x", "y", out="r")).bind(ended(tmp_path / "a", x=1, y=2))
    second = record.add(delivery(tmp_path / "b", 8, "x", "y", out="r"))
    second.bind(ended(tmp_path / "b", RunState.FAILED, failed={"x": "no", "y": "no"}))
    handed = record.by_cell([CELL])[3]
    assert handed.runs == (
        HandedRun(str(tmp_path / "a"), ("x", "y")),
        HandedRun(str(tmp_path / "b"), (), "r"),  # as the kernel has it
    )
    assert not handed.absent
    record.add(delivery(tmp_path / "c", 8, "x", "y", out="r")).bind(ended(tmp_path / "c", x=1, y=2))
    assert record.by_cell([CELL])[3].runs == (HandedRun(str(tmp_path / "c"), ("x", "y"), "r"),)


def test_a_run_in_the_background(record: Returned, tmp_path: Path) -> None:
    options = {"out": "h", "background": True, "raises": False}
    run = record.add(delivery(tmp_path / "a", 8, "x", **options))
    (tmp_path / "a").mkdir()
    handed = record.by_cell([CELL])[3]
    assert handed.runs == ()
    assert handed.absent.keys() == {"x", "h"}
    assert handed.absent["h"].instead == "wait for it with `h.wait()`"

    result = ended(tmp_path / "a", x=1)
    handed = record.by_cell([CELL])[3]
    run_ended = HandedRun(str(tmp_path / "a"), (), "h", handle=True, raises=False)
    assert handed.runs == (run_ended,)
    assert {name: why.instead for name, why in handed.absent.items()} == {
        "x": "`h.wait()` brings it"
    }
    run.bind(result)  # as `h.wait()` does
    handed = record.by_cell([CELL])[3]
    assert (handed.runs, handed.absent) == ((replace(run_ended, names=("x",)),), {})


def test_a_detached_run_brings_nothing_by_itself(record: Returned, tmp_path: Path) -> None:
    record.add(delivery(tmp_path / "a", 8, "x", detached=True))
    ended(tmp_path / "a", x=1)
    handed = record.by_cell([CELL])[3]
    assert (handed.runs, handed.absent["x"].instead) == ((), "`%tpu_attach a` brings it")


def test_a_run_folder_that_was_removed(record: Returned, tmp_path: Path) -> None:
    run = record.add(delivery(tmp_path / "a", 8, "x"))
    run.bind(ended(tmp_path / "a", x=1))
    (tmp_path / "a" / "result.json").unlink()
    handed = record.by_cell([CELL])[3]
    assert handed.runs == ()
    assert "is not there any more" in handed.absent["x"].why
