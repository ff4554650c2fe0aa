"""Lines of the cell around a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tpunb.display.excerpt import around
from tpunb.models import Block, Failure, RunSpec
from tpunb.rundir import RunDir

FAILURE = Failure(2, 12, 1, None, "ValueError", "no data", 7, 3, "", 1.0)


def test_the_lines_around_it_with_the_cells_numbers(
    make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    spec = make_spec(blocks=(Block("prelude", 1, 2, 0, 6), Block("train", 3, 8, 1, 7)))
    assert around(FAILURE, spec, RunDir(tmp_path)) == []
    (tmp_path / "script.py").write_text("\n".join(f"line {n}" for n in range(1, 9)))
    assert around(FAILURE, spec, RunDir(tmp_path)) == [
        (1, "line 3"), (2, "line 4"), (3, "line 5"), (4, "line 6"), (5, "line 7"),
    ]  # fmt: skip
    assert around(replace(FAILURE, line=6), spec, RunDir(tmp_path))[-1] == (6, "line 8")
    for nowhere in ({"line": 9}, {"cell": 3}, {"cell": None}, {"line": None}):
        assert around(replace(FAILURE, **nowhere), spec, RunDir(tmp_path)) == []
