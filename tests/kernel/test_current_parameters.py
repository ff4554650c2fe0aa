"""A run's parameters: the notebook from top to bottom, with the values that the kernel has now.

No processes: cells are executed in one namespace as the kernel does, and the script in another.
"""

from __future__ import annotations

import argparse
import os
import textwrap
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tpunb.kernel.current_parameters import Parameters, PlainNames, with_parameters
from tpunb.notebook.capture.history import Execution
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.models import Cell, Script, Snapshot


@dataclass
class Notebook:
    """A kernel with cells above a train cell that have run once, and others that ran later."""

    above: list[str]
    train: str = "pass"
    kernel: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    others: list[Execution] = field(default_factory=list)
    running: int | None = None

    def __post_init__(self) -> None:
        self.above = [textwrap.dedent(cell).strip() for cell in self.above]
        for cell in self.above:
            exec(cell, self.kernel)

    def run(self, source: str, *, running: bool = False) -> Notebook:
        """Execute a cell that is no part of runs."""
        number = len(self.above) + len(self.others) + 1
        text = textwrap.dedent(source).strip()
        exec(text, self.kernel)
        self.others.append(Execution(text, number))
        self.running = number if running else None
        return self

    def script(self) -> tuple[Script, Parameters]:
        cells = [Cell(i, "code", text, number=i + 1) for i, text in enumerate(self.above)]
        train = Cell(len(cells), "code", f"%%tpu_train\n{self.train}", number=99)
        snapshot = Snapshot((*cells, train), len(cells), None, "a test")
        script = convert(snapshot, {}, held=PlainNames(self.kernel))
        return with_parameters(script, self.kernel, self.others, self.running)

    def start(self) -> tuple[dict[str, Any], Parameters]:
        """Return what a run has after the train cell, block by block, and its parameters."""
        script, parameters = self.script()
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for block in script.blocks:
            if block.role != "header":
                exec(script.source(block), namespace)
        for block in script.blocks:  # a line of a cell is the line of the script
            if block.role == "prelude" and block.cell is not None:
                assert script.source(block).count("\n") == self.above[block.cell].count("\n") + 1
        return namespace, parameters


MAKES = {
    "a number": ("lr = 0.1", "lr = 0.3", "lr"),
    "one of several": ("lr, wd = 0.1, 0.01", "wd = 0.5", "wd"),
    "infinity": ("best = float('inf')", "best = -1e-3", "best"),
    "a path": ("from pathlib import Path\nroot = Path('data')", "root = Path('other')", "root"),
    "a dtype": ("import torch\nkind = torch.float32", "kind = torch.bfloat16", "kind"),
    "a list": ("sizes = [1, 2]", "sizes = [3]", "sizes"),
    "a list in place": ("sizes = [1, 2]", "sizes.append(3)", "sizes"),
    "a dict": ("cfg = {'lr': 0.1,\n       'n': 3}", "cfg['lr'] = 0.3", "cfg"),
    "None": ("limit = None", "limit = 5", "limit"),
    "a huge integer": ("n = 1", "n = 2 ** 200", "n"),
    "a class": ("class CFG:\n    lr = 0.1\n    n = 3", "CFG.lr = 0.3", "CFG.lr"),
    "an attribute": (
        "from types import SimpleNamespace\no = SimpleNamespace()\no.lr = 0.1",
        "o.lr = 0.3",
        "o.lr",
    ),
    "an item of a dict": ("cfg = {'f': len, 'lr': 0.1}", "cfg['lr'] = 0.3", "cfg['lr']"),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    lr: float\no = C(lr=0.1)",
        "o.lr = 0.3",
        "o.lr",
    ),
}


@pytest.mark.parametrize("made", MAKES)
@pytest.mark.parametrize("used", ["", "early = {}", "early = {}; later = 1"])
def test_parameter_changed_in_the_kernel_is_that_of_the_run(made: str, used: str) -> None:
    """Also where the cell itself, or a cell below, uses the value before the train cell."""
    text, change, what = MAKES[made]
    above = [text, "other = 1"]
    if used:
        above[0 if "later" in used else 1] += f"\n{used.format(what)}"
    notebook = Notebook(above, f"seen = {what}").run(change)
    namespace, parameters = notebook.start()
    now = eval(what, notebook.kernel)
    assert namespace["seen"] == now
    if used:
        assert namespace["early"] == now
    assert [name for name, _ in parameters.notes] == [what]
    assert not parameters.left


@pytest.mark.parametrize("made", MAKES)
def test_parameter_that_has_not_changed_leaves_the_script_as_it_is(made: str) -> None:
    notebook = Notebook([MAKES[made][0]], f"seen = {MAKES[made][2]}")
    script, parameters = notebook.script()
    assert "kernel" not in script.text
    assert not parameters.notes
    assert parameters.own == set(parameters.values) != set()


def test_parameter_is_put_above_the_first_cell_that_uses_it() -> None:
    """So the cells between need not run again; a function's own reader counts."""
    notebook = Notebook(
        ["lr = 0.1", "data = [1]", "def rate():\n    return lr", "found = rate()"], "seen = lr"
    ).run("lr = 0.3")
    script, _ = notebook.script()
    prelude = [script.source(b).strip() for b in script.blocks if b.role == "prelude"]
    assert prelude[:3] == ["lr = 0.1", "data = [1]", "lr = 0.3"]
    assert not [b for b in script.blocks if b.role == "parameters"]
    unused = Notebook(["lr = 0.1", "data = [1]"], "seen = lr").run("lr = 0.3")
    script, _ = unused.script()
    assert [script.source(b) for b in script.blocks if b.role == "parameters"] == ["lr = 0.3\n"]


NOT_SET = {
    "counted in a loop": (["step = 0"], "for _ in range(3):\n    step += 1", "step"),
    "a loop's variable": (["lr = 0.1"], "for lr in (1, 2):\n    pass", "lr"),
    "appended in a loop": (["losses = []"], "for i in range(3):\n    losses.append(i)", "losses"),
    "bound twice by the cells": (["lr = 0.1", "lr = lr * 2"], "lr = 5", "lr"),
    "changed by the cells": (["cfg = {'lr': 1}", "cfg['lr'] = 2"], "cfg['lr'] = 9", "cfg['lr']"),
    "an expression": (["data = [1, 2]\nn = len(data)"], "n = 9", "n"),
    "made in __post_init__": (
        [
            "from dataclasses import dataclass\n@dataclass\nclass C:\n    n: int = 0\n"
            "    def __post_init__(self):\n        self.n = self.n or 8\no = C(n=0)"
        ],
        "unrelated = 1",
        "o.n",
    ),
}


@pytest.mark.parametrize("case", NOT_SET)
def test_value_that_nobody_has_set_is_what_the_cells_make(case: str) -> None:
    above, change, what = NOT_SET[case]
    alone = Notebook(above)
    namespace, parameters = Notebook(above, f"seen = {what}").run(change).start()
    assert namespace["seen"] == eval(what, alone.kernel)
    assert not parameters.notes


def test_name_that_no_cell_defines_is_a_parameter_where_it_is_read_first() -> None:
    notebook = Notebook(["x = 1"], "seen = size, depth").run("size = 8\ndepth = 2\nunused = 3")
    notebook.above.append("double = 2 * size")
    namespace, parameters = notebook.start()
    assert namespace["seen"] == (8, 2)
    assert namespace["double"] == 16
    assert parameters.names == {"size", "depth"}
    assert "size: 8 from the kernel; no cell in this run defines it" in list(parameters.lines())
    assert "unused" not in namespace


def test_loop_that_launches_runs_passes_its_variable() -> None:
    notebook = Notebook(["lr = 0.1"], "seen = lr")
    notebook.run("for lr in (0.2,):\n    pass", running=True)
    namespace, _ = notebook.start()
    assert namespace["seen"] == 0.2


def test_environment_variable_set_by_a_cell_is_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADE", "none")
    notebook = Notebook(["import os\nos.environ['SHADE'] = 'dark'"]).run(
        "os.environ['SHADE'] = 'light'"
    )
    notebook.start()
    assert os.environ["SHADE"] == "light"


def test_changes_that_are_no_parameters_are_named_once() -> None:
    notebook = Notebook(
        ["import random\ndata, model = [random], {}", "other = 1"], "seen = data, model"
    )
    notebook.run("data = [random, 2]; model.update(x=random); other = [3, random]; mine = 1")
    _, parameters = notebook.start()
    [line] = parameters.left
    assert line.startswith(
        "cell [3] changes `data`, `model`, which this run has as the cells above"
    )


def test_change_beside_a_parameter_of_the_same_object_is_named() -> None:
    notebook = Notebook(["class CFG:\n    lr, n = 0.1, 2"], "seen = CFG.lr, CFG.n")
    assert not notebook.run("CFG.lr = 0.3").script()[1].left
    _, parameters = notebook.run("for CFG.n in (3, 4):\n    pass").script()
    assert [name for name, _ in parameters.notes] == ["CFG.lr"]
    assert parameters.left[0].startswith("cell [3] changes `CFG`")


def test_cells_with_warnings_of_the_parser_warn_once_in_the_kernel() -> None:
    """As of an invalid escape sequence, or `is` with a literal."""
    notebook = Notebook(["lr = 0.1"], "seen = lr").run("lr = 0.3")
    notebook.above.append(r"pattern = '\d'; same = lr is 3")
    notebook.others.append(Execution(r"other = '\d'", 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert notebook.script()[1].notes


def test_change_before_the_cell_ran_again_is_not_named() -> None:
    notebook = Notebook(["import random\ndata = [random]"], "seen = data")
    notebook.others.append(Execution("data = [random, 2]", 0))
    assert not notebook.script()[1].left


def test_secret_is_neither_written_nor_recorded() -> None:
    notebook = Notebook(["API_KEY = 'abc'"], "seen = API_KEY").run(
        "API_KEY = 'other'; token = 'x1'"
    )
    script, parameters = notebook.script()
    assert "other" not in script.text
    assert not parameters.values


def test_values_that_break_on_comparison_or_conversion_are_left_alone() -> None:
    """As arrays, huge numbers and objects whose methods raise: they are never touched."""

    class Hostile:
        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = None  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    notebook = Notebook(["n = 1\nx = 2\nargs = None\nclass cfg:\n    lr = 1"], "seen = n")
    notebook.kernel |= {"n": 2**20000, "x": Hostile(), "args": argparse.Namespace(a=Hostile())}
    notebook.kernel |= {"big": torch.zeros(3), "odd name": 1, "y": Hostile(), "cfg": Hostile()}
    assert not notebook.script()[1].notes
