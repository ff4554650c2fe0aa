"""What of a notebook runs once for all trials, and where its parameters are set."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tpunb.notebook.models import KEPT, Cell, Snapshot
from tpunb.notebook.trial_cells import defer_parameters, for_trials, note_kept

TRAIN = "%%tpu_train\nfit(model, data)"


def kept(tmp_path: Path, *sources: str) -> list[int]:
    cells = [v4.new_code_cell(source) for source in sources]
    cells[0].metadata.tags = ["parameters"]
    path = tmp_path / "nb.ipynb"
    nbformat.write(v4.new_notebook(cells=cells), path)
    made = json.loads(for_trials(path.read_text(), str(path)))
    nbformat.validate(made)
    return [i for i, c in enumerate(made["cells"]) if KEPT in c["metadata"].get("tags", ())]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["lr = 1", "import time", "data = read()", TRAIN, "print(lr)"], [1, 2]),
        (["lr = 1", "data = read()", "more = data + 1", TRAIN, "plot(more)"], []),
        (["lr = 1", "data = read()", "test = read()", TRAIN, "plot(test)"], []),
        (["lr = 1", "data = load()", "test = read()", TRAIN, "plot(test)"], [1]),
        (["lr = 1", "data = load()", "test = data.part", TRAIN, "plot(test)"], []),
        (["lr = 1", "test = []", "test.append(1)", TRAIN, "plot(test)"], []),
        (["lr = 1", "import os", "data = os.sep", "t = os.name", TRAIN, "print(t)"], [2]),
        (["lr = 1", "!pip install x", "%time data = 1", "data = 2", TRAIN], [2, 3]),
        (["lr = 1", "data = 2", TRAIN, "print(globals())"], []),
        (["lr = 1", "data = 2", "%%tpu_train --name {data}\npass"], []),
        (["lr = 1", "data = 2", "# tpu: skip\nmore = 3"], []),
        (["lr = 1", "import os\nos.environ['A'] = '1'", "os.chdir('x')", "a = 1", TRAIN], [3]),
        (["lr = 1", "import sys", "sys.path.insert(0, 'src')", TRAIN, "import mine"], []),
    ],
)
def test_cells_that_only_the_runs_need(
    tmp_path: Path, cells: list[str], expected: list[int]
) -> None:
    assert kept(tmp_path, *cells) == expected


@pytest.mark.parametrize(
    ("cells", "order"),
    [
        (["lr = 0", "lr = 1", "data = 1", "use(data)", TRAIN], [0, 2, 3, 1, 4]),
        (["lr = 0", "lr = 1", "data = 1", "use(lr)", TRAIN], [0, 2, 1, 3, 4]),
        (["lr = 0", "lr = 1", "def f(): return lr", "f()", TRAIN], [0, 1, 2, 3, 4]),
        (["lr = 0", "lr = 1", "exec(code)", "a = 1", TRAIN], [0, 1, 2, 3, 4]),
        (["lr = 0", "lr = 1", "from x import *", "a = 1", TRAIN], [0, 1, 2, 3, 4]),
    ],
)
def test_parameters_are_set_as_late_as_they_can_be(cells: list[str], order: list[int]) -> None:
    tags = {1: ("injected-parameters",)}
    made = tuple(Cell(i, "code", text, tags=tags.get(i, ())) for i, text in enumerate(cells))
    snapshot = defer_parameters(Snapshot(made, len(cells) - 1, None, "a test"))
    assert [cells.index(cell.source) for cell in snapshot.cells] == order
    assert [cell.index for cell in snapshot.cells] == list(range(len(cells)))
    assert snapshot.train == len(cells) - 1


def test_an_executed_notebook_says_why_a_cell_has_no_output(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    cell = v4.new_code_cell("data = 1", metadata={"tags": [KEPT]})
    nbformat.write(v4.new_notebook(cells=[cell, v4.new_code_cell("1")]), path)
    note_kept(path)
    read = nbformat.read(path, 4)
    nbformat.validate(read)
    assert "once for all trials" in read.cells[0].outputs[0].text
    assert not read.cells[1].outputs
