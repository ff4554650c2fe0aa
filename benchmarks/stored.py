"""What grows with the runs in a folder, and with the steps of a run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from benchmarks.commands import TPUNB, CommandError, run
from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table

RUNS, STEPS, METRICS = 2_000, 100_000, 10
SOURCES = (
    "%load_ext tpunb",
    "import tpunb\nlr = 0.1",
    "%%tpu_train --cores 2\nfor step in range(20):\n    tpunb.log(step, loss=1 / (1 + step) + lr)",
)
SHOWN = """
import time, tpunb
began = time.perf_counter()
shown = {0}
print("took", time.perf_counter() - began)
"""


def measure(folder: Path, rounds: int, runs: int, steps: int) -> str:
    """Measure with these many runs, and steps of ten metrics; returns tables."""
    path = folder / "stored.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(each) for each in SOURCES]), path)
    samples: dict[str, tuple[Samples, float]] = {}

    def add(label: str, seconds: float, goal: float) -> None:
        samples.setdefault(label, (Samples(), goal))[0].add([seconds])

    with Kernel(path) as kernel:
        for at in range(len(SOURCES)):
            kernel.cell(at)
    made = next((folder / "runs").iterdir())
    for number in range(1, runs):
        _copy(made, made.with_name(f"20260101-000000-run-{number}"))
    for _ in range(rounds):
        (folder / "runs" / ".listed.json").unlink(missing_ok=True)
        with Kernel(path) as kernel:
            kernel.cell(0)
            for name, call in (
                ("%tpu_runs", "str(get_ipython().run_line_magic('tpu_runs', ''))"),
                ("tpunb.runs()", "tpunb.runs()"),
            ):
                for label, goal in ((f"{name}, first", 5.0), (f"{name}, again", 0.5)):
                    printed = kernel.do(SHOWN.format(call)).stdout.split()
                    add(label, float(printed[printed.index("took") + 1]), goal)
        for label, goal in (("tpunb clean, first", 5.0), ("tpunb clean, again", 0.5)):
            add(label, _timed(lambda: _clean(folder)), goal)
        _log(made / "metrics.jsonl", steps)
        with Kernel(path) as kernel:
            kernel.cell(0)
            kernel.do("from tpunb.runs import state, directory, figures; import pandas")
            kernel.do(f"result = state.read_result(directory.RunDir({str(made)!r}))")
            for label, call, goal in (
                ("metrics()", "result.metrics()", 2.0),
                ("plot()", "result.plot()._repr_png_()", 4.0),
            ):
                printed = kernel.do(SHOWN.format(call)).stdout.split()
                add(label, float(printed[printed.index("took") + 1]), goal)
        _log(made / "metrics.jsonl", 20)
    rows = [(f"{runs:,} runs; {steps:,} steps of {METRICS} metrics", "seconds", "goal", "")]
    rows += [
        (label, took.text(2), f"{goal} s", met(took, most=goal))
        for label, (took, goal) in samples.items()
    ]
    return table(rows)


def _copy(made: Path, other: Path) -> None:
    shutil.copytree(made, other)
    for name in ("spec.json", "result.json"):
        file = other / name
        file.write_text(file.read_text().replace(made.name, other.name))


def _clean(folder: Path) -> None:
    """List what `tpunb clean` would remove: without a terminal, it asks nobody."""
    with pytest.raises(CommandError, match="nothing was removed"):
        run([TPUNB, "clean", "--keep", "1", "--runs", str(folder / "runs")], folder)


def _timed(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def _log(path: Path, steps: int) -> None:
    with path.open("w") as file:
        for step in range(steps):
            row = {"rank": 0, "attempt": 0, "step": step, "time": 1e9 + step}
            values = {f"metric{n}": n + 1 / (1 + step) for n in range(METRICS)}
            file.write(json.dumps(row | values) + "\n")
