"""`python -m benchmarks`: measure, and print tables that can be pasted anywhere."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks import start, step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=("start", "step"), help="one of the two")
    parser.add_argument("--rounds", type=int, default=4, help="how often each is measured (4)")
    parser.add_argument("--quick", action="store_true", help="one round of little work")
    chosen = parser.parse_args()
    os.environ["PJRT_DEVICE"] = "CPU"  # chips of a TPU would be taken in turns
    rounds = 1 if chosen.quick else chosen.rounds
    began = time.monotonic()
    print(_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="tpunb-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if chosen.only != "step":
            print(start.measure(folder, rounds, 1 if chosen.quick else 5) + "\n", flush=True)
        if chosen.only != "start":
            epochs, sizes = (2, (2,)) if chosen.quick else (6, (1, 2))
            print(step.measure(folder, rounds, epochs, sizes) + "\n", flush=True)
    print(f"{time.monotonic() - began:.0f} s in all, load {os.getloadavg()[0]:.1f} at the end")


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("tpunb", "torch", "torch_xla"))
    return (
        f"{packages}, Python {platform.python_version()}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.1f} at the start.\n"
        "All in turn in one run; the median, and in brackets the lowest and the highest.\n"
    )


if __name__ == "__main__":
    main()
