from __future__ import annotations

from tpunb.runs.cell_lines import CellLines
from tpunb.runs.spec import Block, RunSpec

BLOCKS = (
    Block("header", 1, 10),
    Block("prelude", 13, 15, 0, 4, origin=("/runs/before/script.py", 12)),
    Block("train", 18, 20, 1, 7),
)


def lines() -> CellLines:
    return CellLines("/runs/now/script.py", RunSpec("now", "n", 1, "CPU", "/", (), BLOCKS))


def test_a_line_of_the_runs_own_script() -> None:
    assert lines().locate("/runs/now/script.py", 19) == (7, 2)
    assert lines().describe("/runs/now/script.py", 13) == "cell [4], line 1"


def test_line_of_a_kept_prelude_cell_is_mapped_to_its_cell() -> None:
    assert lines().script_line("/runs/before/script.py", 14) == 15
    assert lines().describe("/runs/before/script.py", 14) == "cell [4], line 3"


def test_line_outside_cells_is_named_by_its_file() -> None:
    assert lines().script_line("/runs/before/script.py", 15) is None
    assert lines().describe("/runs/before/script.py", 15) == "line 15 of script.py"
    assert lines().locate("/lib/other.py", 1) == (None, None)
    assert "/lib/other.py" not in lines()
    assert "/runs/before/script.py" in lines()
