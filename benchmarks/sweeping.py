"""A sweep compared with a loop over papermill: the same notebook, the same trials.

The notebook computes for some seconds, independently of the parameters, and trains briefly.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from nbformat import v4

from benchmarks.commands import PYTHON, TPUNB, run
from benchmarks.table import Samples, table

PREPARE = """\
import time

import torch

began = time.monotonic()
data = torch.rand(1000, 64)
while time.monotonic() - began < {seconds}:
    data = (data @ data.T @ data).softmax(1)"""
TRAIN = """\
%%tpu_train --cores 1
import tpunb

model = torch.nn.Linear(64, 1)
for step in range(20):
    loss = (model(data) - lr).square().mean()
    tpunb.log(step, loss=loss)
    loss.backward()"""
LOOP = """\
import sys

import papermill

for number, lr in enumerate(map(float, sys.argv[2:])):
    papermill.execute_notebook(
        sys.argv[1],
        f"loop-{number}.ipynb",
        {"lr": lr},
        kernel_name="python3",
        language="python",
        progress_bar=False,
    )"""


def measure(folder: Path, rounds: int, trials: int, preludes: tuple[int, ...]) -> str:
    """Run all trials of each prelude in both ways, `rounds` times; returns a table."""
    (folder / "loop.py").write_text(LOOP)
    values = [str((number + 1) / 16) for number in range(trials)]
    rows = [["prelude", f"papermill, {trials} trials", "tpunb sweep", "ratio", "a later trial"]]
    for seconds in preludes:
        notebook = _write(folder / f"prelude_{seconds}.ipynb", seconds)
        loop, sweep, later = Samples(), Samples(), Samples()
        for _ in range(rounds):
            began = time.monotonic()
            run([PYTHON, "loop.py", notebook.name, *values], folder)
            loop.add([time.monotonic() - began])
            began = time.monotonic()
            grid = f"lr={','.join(values)}"
            run([TPUNB, "sweep", notebook.name, "--grid", grid, "--again"], folder)
            sweep.add([time.monotonic() - began])
            later.add(_later(folder, notebook.stem))
        ratio = loop.over(sweep)
        rows.append(
            [f"{seconds} s", loop.text(1), sweep.text(1), f"{ratio.text(1)} ×", later.text(1)]
        )
    return table(rows)


def _write(path: Path, seconds: int) -> Path:
    import nbformat

    parameters = v4.new_code_cell("lr = 0.5", metadata={"tags": ["parameters"]})
    sources = ["%load_ext tpunb", PREPARE.format(seconds=seconds), TRAIN]
    first, *others = map(v4.new_code_cell, sources)
    nbformat.write(v4.new_notebook(cells=[first, parameters, *others]), path)
    return path


def _later(folder: Path, name: str) -> list[float]:
    """Seconds of each trial of the newest sweep, except the first."""
    newest = max(folder.glob(f"runs/sweeps/{name}-*"), key=lambda path: path.stat().st_mtime_ns)
    trials = [json.loads(path.read_text()) for path in sorted(newest.glob("trials/*.json"))]
    return [trial["ended"] - trial["started"] for trial in trials[1:]]
