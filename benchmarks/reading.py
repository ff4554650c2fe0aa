"""How long a train cell takes to read a large notebook before it starts the run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from nbconvert.exporters import PythonExporter
from nbformat import v4

from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table
from tpunb.notebook.capture.capture import capture
from tpunb.notebook.capture.history import History
from tpunb.notebook.convert.convert import convert, warm_up
from tpunb.notebook.convert.fork_safety import static_reason
from tpunb.notebook.lint.linter import lint

CELLS = 1000
TRAIN = "%%tpu_train\nprint(total)"
CODE = '''\
import math
from torch import nn


class Block{n}(nn.Module):
    """A layer and its activation."""

    def __init__(self, width: int = {n}) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.scale = 1 / math.sqrt(width)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).relu() * self.scale
        return x


rows_{n} = [{{"epoch": epoch, "rate": 0.1 / (1 + epoch)}} for epoch in range(10)]
best_{n} = min((row["rate"] for row in rows_{n} if row["epoch"] > 2), default=None)'''
"""A cell of twenty lines."""
MAGICS = "!nvidia-smi\n%matplotlib inline\n"


def measure(folder: Path, rounds: int) -> str:
    """Measure each step from the cell to the script; returns tables."""
    warm_up()
    reports = [_reading(folder, rounds, "plain", ""), _reading(folder, rounds, "magics", MAGICS)]
    return "\n\n".join([*reports, _loading(folder, rounds)])


def _reading(folder: Path, rounds: int, name: str, head: str) -> str:
    cells = [v4.new_code_cell(head + CODE.format(n=n)) for n in range(CELLS)]
    notebook = v4.new_notebook(cells=[*cells, v4.new_code_cell(TRAIN)])
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    history = _executed(notebook)
    samples: dict[str, Samples] = {}

    def timed(label: str, step: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        made = step()
        samples.setdefault(label, Samples()).add([time.perf_counter() - began])
        return made

    for _ in range(rounds):
        began = time.perf_counter()
        snapshot = timed("captured", lambda: capture(history, notebook=str(path), environ={}))
        script = timed("converted", lambda s=snapshot: convert(s))
        timed("linted", lambda s=snapshot: lint(s))
        samples.setdefault("all three", Samples()).add([time.perf_counter() - began])
        timed("read for what forbids a fork", lambda s=script: static_reason(s))
        timed("nbconvert's PythonExporter", lambda: PythonExporter().from_notebook_node(notebook))
    history.close()
    lines = sum(cell.source.count("\n") + 1 for cell in notebook.cells)
    title = f"Reading: a notebook of {CELLS:,} cells and {lines:,} lines"
    title += ", two magics in each cell." if head else "."
    rows = [("step", "seconds"), *((label, taken.text(2)) for label, taken in samples.items())]
    whole = samples["all three"]
    goals = [("goal", "measured", "")]
    if not head:
        goals.append(
            (
                "captured, converted and linted in 2 s",
                f"{whole.median():.2f} s",
                met(whole, most=2.0),
            )
        )
    against = whole.over(samples["nbconvert's PythonExporter"])
    goals.append(("… against nbconvert, which only converts", f"{against.text(2)} ×", ""))
    return f"{title}\n\n{table(rows)}\n\n{table(goals)}"


def _executed(notebook: Any) -> History:
    """The history of a shell that has run every cell, the train cell last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shell = InteractiveShell()
    shell.history_manager.input_hist_raw[:] = ["", *(cell.source for cell in notebook.cells)]
    return History(shell)


def _loading(folder: Path, rounds: int) -> str:
    """Time `%load_ext tpunb` in new kernels, and the imports that it does not need."""
    path = folder / "loading.ipynb"
    sources = ["%load_ext tpunb", "import torch", "import nbconvert.exporters"]
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources]), path)
    samples = [Samples() for _ in sources]
    for _ in range(rounds):
        with Kernel(path) as kernel:
            for index, taken in enumerate(samples):
                ran = kernel.cell(index)
                taken.add([ran.done - ran.sent])
    rows = [("cell, the first in a new kernel", "seconds")]
    rows += [(source, taken.text(2)) for source, taken in zip(sources, samples, strict=True)]
    goal = ("%load_ext tpunb in 0.15 s", f"{samples[0].median():.2f} s", met(samples[0], most=0.15))
    return f"Loading\n\n{table(rows)}\n\n{table([('goal', 'measured', ''), goal])}"
