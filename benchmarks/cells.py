"""What a cell in the kernel costs more with tpunb loaded, whatever the kernel holds."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table

MOST = 5.0
"""Milliseconds that a cell may take longer."""
HOLDS = """
import numpy as np, torch
for i in range({names}):
    globals()[f"v{{i}}"] = i
numbers = list(range({numbers}))
big = np.ones({bytes} // 8)
model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range({modules})))
huge = 2 ** 20000
"""
MUCH = {"names": 250, "numbers": 10_000_000, "bytes": 2_000_000_000, "modules": 3000}
LITTLE = {"names": 25, "numbers": 10_000, "bytes": 8_000_000, "modules": 30}
TIMED = """
import time
began, runs = time.perf_counter(), {cells}
for _ in range(runs):
    get_ipython().run_cell("x = 1", store_history=True)
print("took", (time.perf_counter() - began) / runs)
"""


def measure(folder: Path, rounds: int, cells: int, holds: dict[str, int]) -> str:
    """Run the same cells in two kernels, with tpunb and without."""
    ways = {"without tpunb": "pass", "with tpunb": "%load_ext tpunb"}
    samples = {way: Samples() for way in ways}
    for number in range(rounds):
        for way, load in ways.items():
            path = folder / f"cells{number}{len(load)}.ipynb"
            sources = (load, HOLDS.format(**holds), TIMED.format(cells=cells))
            nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(s) for s in sources]), path)
            with Kernel(path) as kernel:
                for index in range(2):
                    kernel.cell(index)
                printed = kernel.cell(2).stdout.split()
                samples[way].add([1000 * float(printed[printed.index("took") + 1])])
    with_, without = samples["with tpunb"], samples["without tpunb"]
    more = with_.minus(without)
    rows = [["a cell in a kernel that holds much", "ms", f"goal: {MOST} ms more"]]
    rows += [[way, took.text(2), ""] for way, took in samples.items()]
    return table([*rows, ["more", more.text(2), met(more, most=MOST)]])
