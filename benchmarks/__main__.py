"""`python -m benchmarks`: run the benchmarks and print their results as plain text tables."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from benchmarks import (
    cells,
    collectives,
    diagnosing,
    doctor,
    failing,
    hosts,
    large,
    lines,
    loop,
    predict,
    prelude,
    reading,
    start,
    step,
    stored,
    watching,
)

MEASURES: dict[str, tuple[Callable[[Path, int], str], Callable[[Path], str]]] = {
    "start": (
        lambda folder, rounds: start.measure(folder, rounds, 5),
        lambda folder: start.measure(folder, 1, 1),
    ),
    "loop": (loop.measure, lambda folder: loop.measure(folder, 1, loop.LITTLE)),
    "cells": (
        lambda folder, rounds: cells.measure(folder, rounds, 20, cells.MUCH),
        lambda folder: cells.measure(folder, 1, 3, cells.LITTLE),
    ),
    "prelude": (prelude.measure, lambda folder: prelude.measure(folder, 1, 200, 8)),
    "step": (
        lambda folder, rounds: step.measure(folder, rounds, 9, (1, 2), 3000),
        lambda folder: step.measure(folder, 1, 3, (2,), 100),
    ),
    "collectives": (collectives.measure, collectives.measure_a_little),
    "reading": (reading.measure, lambda folder: reading.measure(folder, 1)),
    "large": (
        lambda folder, rounds: large.measure(folder, rounds, large.CELLS, large.OUTPUTS, 20),
        lambda folder: large.measure(folder, 1, 12, 100_000, 1),
    ),
    "stored": (
        lambda folder, rounds: stored.measure(folder, rounds, stored.RUNS, stored.STEPS),
        lambda folder: stored.measure(folder, 1, 20, 1000),
    ),
    "doctor": (
        doctor.measure,
        lambda folder: doctor.measure(folder, 1, ("laptop", doctor.STALLED)),
    ),
    "diagnosing": (diagnosing.measure, lambda folder: diagnosing.measure(folder, 1)),
    "failing": (
        failing.measure,
        lambda folder: failing.measure(folder, 1, ("fail", "loop")),
    ),
    "predict": (
        lambda folder, rounds: predict.measure(folder, rounds, 4, 3000),
        lambda folder: predict.measure(folder, 1, 2, 100),
    ),
    "lines": (
        lambda folder, rounds: lines.measure(folder, rounds, 100_000),
        lambda folder: lines.measure(folder, 1, 50),
    ),
    "hosts": (
        lambda folder, rounds: hosts.measure(folder, rounds, hosts.HOSTS, hosts.RANKS, 20),
        lambda folder: hosts.measure(folder, 1, 3, 2, 2),
    ),
    "watching": (
        lambda folder, rounds: watching.measure(folder, rounds, 20),
        lambda folder: watching.measure(folder, 1, 3),
    ),
}
"""Each benchmark in its full and its quick form."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=MEASURES, help="run only this benchmark")
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds of each (4)")
    parser.add_argument("--quick", action="store_true", help="one round of little work")
    chosen = parser.parse_args()
    os.environ["PJRT_DEVICE"] = "CPU"  # the chips of a TPU can be used by one process at a time
    began = time.monotonic()
    print(_machine(), flush=True)
    for name in [chosen.only] if chosen.only else MEASURES:
        whole, quick = MEASURES[name]
        with tempfile.TemporaryDirectory(prefix="tpunb-bench-", ignore_cleanup_errors=True) as made:
            folder = Path(made)
            report = quick(folder) if chosen.quick else whole(folder, chosen.rounds)
        print(f"{report}\n", flush=True)
    print(f"{time.monotonic() - began:.0f} s in all, load {os.getloadavg()[0]:.1f} at the end")


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("tpunb", "torch", "torch_xla"))
    return (
        f"{packages}, Python {platform.python_version()}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.1f} at the start.\n"
        "All measured alternately in one run: median, and in brackets the lowest and the highest.\n"
    )


if __name__ == "__main__":
    main()
