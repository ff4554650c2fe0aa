"""The benchmarks run, and print what they measured. How long anything takes is not tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.table import Samples, met, table

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    ("which", "rows"),
    [
        (
            "start",
            [
                r"%%tpu_train, preloaded {2,}N {2,}N",
                r"%%tpu_train --cold {2,}N {2,}N",
                r"%%tpu_train, the first .* {2,}N {2,}N",
                r"jupyter nbconvert .* {2,}N",
                r"torchrun .*, script of tpunb convert {2,}N",
                r"torchrun .*, script without tpunb {2,}N",
                r"python -c .* {2,}N {2,}N",
                r"preloaded ≤ 0\.5 s {2,}\d\.\d\d s {2,}(met|missed)",
                r"preloaded at least 20 × .* {2,}N × {2,}(met|missed)",
                r"--cold ≤ 1\.2 × .* {2,}N × {2,}(met|missed)",
                r"the first in a new kernel ≤ 1\.0 × {2,}N × {2,}(met|missed)",
            ],
        ),
        (
            "loop",
            [
                r"first run {2,}N {2,}N {2,}N",
                r"the train cell {2,}N {2,}N {2,}N {2,}N",
                r"the last cell above it {2,}N {2,}N {2,}N {2,}N",
                r"a cell in the middle {2,}N {2,}N {2,}N {2,}N",
                r"nothing {2,}N {2,}N {2,}N {2,}N",
                r"a parameter, in a cell below {2,}N {2,}N {2,}N {2,}N",
                r"a parameter, in its cell {2,}N {2,}N {2,}N {2,}N",
                r"nothing, and 40 MB in the prelude {2,}N {2,}N",
                r"nothing edited ≤ 0\.25 s {2,}N s {2,}(met|missed)",
                r"… ≤ 3 × notebook_launcher {2,}N × {2,}(met|missed)",
                r"… with much data ≤ 0\.5 s {2,}N s {2,}(met|missed)",
                r"last cell edited ≤ its time \+ 0\.3 s {2,}N s {2,}(met|missed)",
                r"computing ≤ 1\.1 × the kernel's {2,}N × {2,}(met|missed)",
            ],
        ),
        (
            "prelude",
            [
                r"torch {2,}N {2,}N {2,}N {2,}N {2,}N",
                r"numpy {2,}N {2,}N {2,}N {2,}N {2,}N",
                r"scikit-learn {2,}N {2,}N {2,}N {2,}N {2,}N",
                r"in all {2,}N {2,}N {2,}N {2,}N {2,}N",
                r"prelude ≤ 1\.1 × the kernel {2,}N × {2,}(met|missed)",
                r"8 forks between mixed work: exit 0: 8; a fork takes \S+ ms \(99 %: \S+ ms\)",
            ],
        ),
        (
            "step",
            [
                r"2 {2,}as it is {2,}N {2,}N {2,}N {2,}N {2,}(met|missed)",
                r"2 {2,}without tpunb\.log {2,}N {2,}N {2,}N {2,}N {2,}(met|missed)",
                r"2 {2,}with tpunb\.track too {2,}N {2,}N {2,}N {2,}N {2,}(met|missed)",
                r"2 {2,}tpunb\.log {2,}N {2,}N {2,}(met|missed)",
                r"2 {2,}tpunb\.log and tpunb\.track {2,}N {2,}N {2,}(met|missed)",
                r"the look at each step of a run {2,}N {2,}N {2,}N {2,}(met|missed)",
                r'shard, remainder="drop" {2,}N {2,}N {2,}N {2,}(met|missed)',
                r"shard and masked_loss {2,}N {2,}N {2,}N {2,}(met|missed)",
                r"Accumulation of four pieces {2,}N {2,}N {2,}N {2,}(met|missed)",
            ],
        ),
        (
            "reading",
            [
                # Once for plain cells, and once for cells with magics.
                *[r"all three {2,}N"] * 2,
                *[r"nbconvert's PythonExporter {2,}N"] * 2,
                r"captured, converted and linted in 2 s {2,}\d+\.\d\d s {2,}(met|missed)",
                r"%load_ext tpunb in 0\.15 s {2,}\d+\.\d\d s {2,}(met|missed)",
            ],
        ),
        (
            "doctor",
            [
                r"laptop {2,}N {2,}N {2,}N",
                r"v5e-8, its metadata server stalls {2,}N {2,}N {2,}N",
                r"≤ 0\.5 s on each {2,}\d\.\d\d s {2,}(met|missed)",
            ],
        ),
        (
            "failing",
            [
                # Once for a rank that fails, and once for the stop button.
                *[r"%%tpu_train {2,}N {2,}yes {2,}N {2,}none"] * 2,
                *[r"accelerate's notebook_launcher {2,}N {2,}\w+ {2,}(N|not in \d+ s) .*"] * 2,
                *[r"nbconvert, then !python {2,}N {2,}\w+ {2,}(N|not in \d+ s) .*"] * 2,
                r"%%tpu_train: all gone within .* {2,}N s {2,}(met|missed)",
            ],
        ),
        (
            "predict",
            [
                r"predict on 2 ranks {2,}N",
                r"rank 0 of them, while the others wait {2,}N {2,}N",
                r"a rank by itself, with \d+ processors {2,}N {2,}N",
            ],
        ),
        (
            "lines",
            [
                r"%%tpu_train {2,}N {2,}N {2,}D {2,}N {2,}50 {2,}50",
                r"%%tpu_train {2,}N {2,}N {2,}D {2,}N {2,}200 {2,}200",
                *[r"accelerate's notebook_launcher {2,}N {2,}N {2,}D {2,}N {2,}\d+ {2,}-"] * 2,
                *[r"nbconvert, then !python {2,}N {2,}N {2,}D {2,}N {2,}\d+ {2,}-"] * 2,
                r"all 50 lines in run\.log {2,}50 {2,}met",
                r"all 200 lines in run\.log {2,}200 {2,}met",
            ],
        ),
        (
            "hosts",
            [
                r"s until the last host is there .* {2,}N",
                r"s from then until the last rank's first line {2,}N",
                r"s between the first rank's .* {2,}N",
                r"kB/s in and out of host 0, of heartbeats {2,}N",
                r"% of a core, host 0's supervisor {2,}N",
                r"% of a core, another one {2,}N",
                r"lines that came, of 240 {2,}240\.00 \(240\.00–240\.00\)",
                r"lines/s {2,}N",
                r"kB/s of streams {2,}N",
                r"s from a stop at the last host until all have ended {2,}N",
            ],
        ),
        ("sweeping", [r"0 s {2,}N {2,}N {2,}N × {2,}N"]),
        (
            "watching",
            [
                r"8 ranks, 1,000 lines/s each {2,}N {2,}N {2,}N {2,}N",
                r"256 simulated ranks {2,}N {2,}N {2,}N {2,}N",
                r"8 ranks: under 5 % of one core {2,}\d+\.\d % {2,}(met|missed)",
                r"8 ranks: run\.log is complete {2,}0 missing {2,}met",
                r"8 ranks: the server drops nothing {2,}0 times {2,}met",
                r"256 ranks: two updates a second {2,}\d\.\d\d {2,}(met|missed)",
                r"256 ranks: a card of at most 10 kB {2,}\d\.\d kB {2,}met",
            ],
        ),
    ],
)
@pytest.mark.timeout(600)  # some start a kernel and torchrun, one after the other
def test_benchmark_quick_mode_prints_its_table(which: str, rows: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", which],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    number = r"\d+\.\d+"
    for row, times in Counter(rows).items():
        pattern = row.replace("N", rf"{number} \({number}–{number}\)")
        pattern = pattern.replace("D", rf"-?{number} \(-?{number}–-?{number}\)")
        found = re.findall(f"^{pattern}$", done.stdout, re.MULTILINE)
        assert len(found) == times, f"{row}\n{done.stdout}"


def test_benchmark_ratios_compare_the_same_round() -> None:
    slow, quick = Samples(), Samples()
    for slow_ones, quick_ones in (([10.0], [1.0, 2.0, 9.0]), ([40.0], [4.0]), ([90.0], [9.0])):
        slow.add(slow_ones)
        quick.add(quick_ones)
    assert slow.over(quick).text(1) == "10.0 (5.0–10.0)"
    assert met(slow.over(quick), least=10.0) == met(slow, most=40.0) == "met"
    assert met(slow.over(quick), least=10.1) == met(slow, most=39.9) == "missed"


def test_benchmark_table_columns_are_aligned() -> None:
    assert table([("what", "s"), ("a", "1.0"), ("longer", "2.0")]).splitlines() == [
        "what    s",
        "------  ---",
        "a       1.0",
        "longer  2.0",
    ]
