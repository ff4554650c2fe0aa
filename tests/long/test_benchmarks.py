"""The benchmarks run, and print what they measured. How long anything takes is not tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


MEASURED = {
    "start": 7, "loop": 8, "prelude": 4, "step": 10, "reading": 4, "doctor": 2, "failing": 6,
    "predict": 3, "lines": 6, "hosts": 9, "watching": 2, "large": 13,
}  # fmt: skip
"""Benchmarks, and how many rows each measures in its quick mode."""
KEPT = {
    "step": ["2      MB of tensors at once"],
    "lines": ["all 50 lines in run.log", "all 200 lines in run.log"],
    "watching": ["8 ranks: run.log is complete", "256 ranks: a card of at most 10 kB"],
}
"""Rows of promises that do not depend on the machine's speed: none of them is missed."""


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("which", MEASURED)
@pytest.mark.timeout(600)  # some start a kernel and torchrun, one after the other
def test_benchmark_quick_mode_prints_its_table(which: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", which],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    number = r"\d+\.\d+"
    rows = re.findall(rf"^.* {{2,}}{number} \({number}–{number}\).*$", done.stdout, re.MULTILINE)
    assert len(rows) >= MEASURED[which], done.stdout
    for name in KEPT.get(which, ()):
        [*found] = [line for line in done.stdout.splitlines() if line.startswith(name)]
        assert found, name
        assert not any(line.endswith("missed") for line in found), done.stdout
