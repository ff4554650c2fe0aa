"""Where in the notebook a run has failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tpunb.excerpt import placed
from tpunb.models import Block, Failure, RunSpec
from tpunb.rundir import RunDir

FAILURE = Failure(2, 12, 1, None, "ValueError", "no data", 7, 3, "", 1.0)
BLOCKS = (Block("prelude", 1, 2, 0, 6), Block("train", 3, 8, 1, 7))
SPEC = RunSpec("id", "n", 4, "CPU", "/", (), BLOCKS)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "script.py").write_text("\n".join(f"line {n}" for n in range(1, 9)))
    return RunDir(tmp_path)


def test_the_lines_around_it_with_the_cells_numbers(run: RunDir) -> None:
    assert placed(FAILURE, SPEC, run).source == (
        (1, "line 3"), (2, "line 4"), (3, "line 5"), (4, "line 6"), (5, "line 7"),
    )  # fmt: skip
    assert placed(replace(FAILURE, line=6), SPEC, run).source[-1] == (6, "line 8")


@pytest.mark.parametrize("nowhere", [{"line": 9}, {"cell": 3}, {"cell": None}, {"line": None}])
def test_a_place_that_is_not_known_has_no_lines(run: RunDir, nowhere: dict[str, None]) -> None:
    failure = replace(FAILURE, **nowhere)
    assert placed(failure, SPEC, run) == failure
    run.script.unlink()
    assert placed(FAILURE, SPEC, run) == FAILURE


def test_the_cells_id(run: RunDir) -> None:
    run.snapshot.write_text(json.dumps({"cells": [{"id": "a"}, {"id": "b"}]}))
    assert placed(FAILURE, SPEC, run).cell_id == "b"
    run.snapshot.write_text(json.dumps({"cells": [{"id": "a"}, {"id": None}]}))
    assert placed(FAILURE, SPEC, run).cell_id is None
