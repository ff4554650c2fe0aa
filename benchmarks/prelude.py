"""Computation in a prelude compared with the same cell in the kernel and in a plain process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks.commands import PYTHON, run
from benchmarks.kernel import Kernel
from benchmarks.start import SETUP
from benchmarks.table import Samples, met, table

IMPORTS = """\
import os
import sys
import time

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier

FOLDER = {folder!r}


def timed(kind, work):
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    with open(os.path.join(FOLDER, os.path.basename(sys.argv[0]) + ".txt"), "a") as file:
        file.write(f"{{kind}}: {{seconds}}\\n")"""
COMPUTING = """\
torch.manual_seed(0)
a = torch.rand({size}, {size})
b = np.random.default_rng(0).random(({size}, {size}))
x, y = make_classification(20 * {size}, 20, random_state=0)


def torch_work():
    with torch.no_grad():
        torch.nn.Conv2d(3, 16, 5)(torch.rand({size} // 40, 3, 128, 128))
        for _ in range(10):
            a @ a


def numpy_work():
    for _ in range(5):
        b @ b
    np.linalg.svd(b[: {size} // 4])


timed("torch", torch_work)
timed("numpy", numpy_work)
timed("scikit-learn", lambda: HistGradientBoostingClassifier(max_iter=30).fit(x, y))"""
TRAIN = '%%tpu_train --cores 2\nprint("trained", a.shape)'
KINDS = ("torch", "numpy", "scikit-learn", "in all")


def measure(folder: Path, rounds: int, size: int = 2000, forks: int = 1000) -> str:
    """Measure the three alternately, `rounds` times; the matrices have `size` rows."""
    imports, computing = IMPORTS.format(folder=str(folder)), COMPUTING.format(size=size)
    sources = [SETUP, imports, computing, TRAIN]
    notebook = folder / "prelude.ipynb"
    cells = [v4.new_code_cell(source) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells), notebook)
    (folder / "plain.py").write_text(f"{imports}\n\n{computing}\n", encoding="utf-8")
    seconds: dict[str, dict[str, Samples]] = {}
    with Kernel(notebook) as kernel:
        kernel.cell(0)
        kernel.cell(1)
        kernel.cell(2)
        kernel.cell(3)
        ways: dict[str, Callable[[], object]] = {
            "plain.py": lambda: run([PYTHON, "plain.py"], folder),
            "ipykernel_launcher.py": lambda: kernel.cell(2),  # so that the run executes it again
            "script.py": lambda: kernel.cell(3, await_words=["trained"]),
        }
        for _ in range(rounds):
            for way, do in ways.items():
                told = folder / f"{way}.txt"
                told.unlink(missing_ok=True)
                do()
                for kind, value in _times(told).items():
                    seconds.setdefault(way, {}).setdefault(kind, Samples()).add([value])
    return f"{_report(*(seconds[way] for way in ways))}\n\n{_forks(forks)}"


def _forks(count: int) -> str:
    """Fork children between work in torch, numpy, scikit-learn and others; count how they end."""
    root = Path(__file__).parents[1]
    told = json.loads(run([PYTHON, "-m", "tests.drivers.forks", str(count)], root).text)
    ends = ", ".join(f"{end}: {number}" for end, number in told["ends"].items())
    median, slow = told["fork_ms"]
    return f"{count} forks between mixed work: {ends}; a fork takes {median} ms (99 %: {slow} ms)"


def _times(told: Path) -> dict[str, float]:
    lines = [line.partition(": ") for line in told.read_text(encoding="utf-8").splitlines()]
    times = {kind: float(value) for kind, _, value in lines}
    return {**times, "in all": sum(times.values())}


def _report(plain: dict[str, Samples], kernel: dict[str, Samples], run: dict[str, Samples]) -> str:
    rows = [("seconds", "plain process", "kernel", "prelude", "prelude / kernel", "… / process")]
    for kind in KINDS:
        samples = (plain[kind], kernel[kind], run[kind])
        ratios = (run[kind].over(kernel[kind]), run[kind].over(plain[kind]))
        rows.append((kind, *(s.text(2) for s in samples), *(s.text(2) for s in ratios)))
    slower = run["in all"].over(kernel["in all"])
    goals = [
        ("goal", "measured", ""),
        ("prelude ≤ 1.1 × the kernel", f"{slower.text(2)} ×", met(slower, most=1.1)),
    ]
    head = "Prelude: computing in the cells above a train cell, with all processors."
    return f"{head}\n\n{table(rows)}\n\n{table(goals)}"
