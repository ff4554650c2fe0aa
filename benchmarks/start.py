"""Seconds from sending the train cell to the first line of a rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks.commands import JUPYTER, PYTHON, TPUNB, run, torchrun
from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table
from tests.drivers.kernel import Ran

RANKS = 2
WORDS = "is here at"
SETUP = "%load_ext tpunb\n%tpu_setup"
PRELUDE = """\
import os
import time

import torch
import torch_xla

images = torch.rand(100, 3, 32, 32)
mean, spread = images.mean(dim=(0, 2, 3)), images.std(dim=(0, 2, 3))"""
IMPORT = "import torch_xla; print('imported', flush=True)"
TRAIN = f"""\
print(f"rank {{os.environ.get('RANK', 0)}} {WORDS} {{time.monotonic():.3f}}", flush=True)"""


def measure(folder: Path, rounds: int, warm_runs: int) -> str:
    """Measure all variants alternately, `rounds` times; returns tables."""
    notebook = _write(folder / "start.ipynb", [SETUP, PRELUDE, _train("{options}")])
    cold = _write(folder / "cold.ipynb", ["%load_ext tpunb", PRELUDE, _train("")])
    _write(folder / "plain.ipynb", [PRELUDE, TRAIN])
    run([TPUNB, "convert", "cold.ipynb", "-o", "header.py"], folder)
    run([JUPYTER, "nbconvert", "--to", "python", "--output", "bare", "plain.ipynb"], folder)

    seconds: dict[str, Samples] = {}
    printed: dict[str, Samples] = {}
    with Kernel(notebook) as kernel:
        kernel.do("options = ''")
        kernel.cell(0)
        kernel.cell(1)
        kernel.wait_until_warm()

        def warm() -> list[Ran]:
            kernel.do("options = ''")
            return [kernel.cell(2, await_words=[WORDS]) for _ in range(warm_runs)]

        def fresh() -> list[Ran]:
            kernel.do("options = '--cold'")
            return [kernel.cell(2, await_words=[WORDS])]

        def in_kernel(name: str, cells: list[Ran]) -> list[float]:
            printed.setdefault(name, Samples()).add([_printed(ran) for ran in cells])
            return [ran.found - ran.sent for ran in cells if ran.found is not None]

        def importing() -> list[float]:
            ran = run([PYTHON, "-c", IMPORT], folder, await_words="imported")
            assert ran.first is not None
            printed.setdefault("import", Samples()).add([ran.first - ran.started])
            return [ran.ended - ran.started]

        variants: dict[str, Callable[[], list[float]]] = {
            "warm": lambda: in_kernel("warm", warm()),
            "fresh": lambda: in_kernel("fresh", fresh()),
            "cold": lambda: in_kernel("cold", [_in_new_kernel(cold)]),
            "nbconvert": lambda: [_nbconvert_and_python(folder)],
            "torchrun": lambda: [_torchrun(folder, "header.py")],
            "bare": lambda: [_torchrun(folder, "bare.py")],
            "import": importing,
        }
        for _ in range(rounds):
            for name, variant in variants.items():
                seconds.setdefault(name, Samples()).add(variant())
    return _report(seconds, printed)


def _train(options: str) -> str:
    return f"%%tpu_train --cores {RANKS} {options}".rstrip() + f"\n{TRAIN}"


def _write(path: Path, sources: list[str]) -> Path:
    cells = [v4.new_code_cell(source) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


def _printed(ran: Ran) -> float:
    """Seconds from sending the cell until the first rank printed."""
    times = [float(line.rpartition(" ")[2]) for line in ran.printed().splitlines() if WORDS in line]
    if len(times) != RANKS:
        raise AssertionError(f"{len(times)} ranks printed, not {RANKS}:\n{ran.printed()}")
    return min(times) - ran.sent


def _in_new_kernel(notebook: Path) -> Ran:
    """Run the first train cell of a new kernel, where nothing is preloaded."""
    with Kernel(notebook) as kernel:
        kernel.cell(0)
        kernel.cell(1)
        return kernel.cell(2, await_words=[WORDS])


def _nbconvert_and_python(folder: Path) -> float:
    started = time.monotonic()
    run([JUPYTER, "nbconvert", "--to", "python", "plain.ipynb"], folder)
    first = run([PYTHON, "plain.py"], folder, await_words=WORDS).first
    assert first is not None
    return first - started


def _torchrun(folder: Path, script: str) -> float:
    ran = run(torchrun(RANKS, script), folder, await_words=WORDS)
    assert ran.first is not None
    return ran.first - ran.started


def _report(seconds: dict[str, Samples], printed: dict[str, Samples]) -> str:
    labels = {
        "warm": "%%tpu_train, preloaded",
        "fresh": "%%tpu_train --cold",
        "cold": "%%tpu_train, the first in a new kernel without %tpu_setup",
        "nbconvert": "jupyter nbconvert --to python, then python",
        "torchrun": f"torchrun --nproc-per-node={RANKS}, script of tpunb convert",
        "bare": f"torchrun --nproc-per-node={RANKS}, script without tpunb",
        "import": 'python -c "import torch_xla": to its end; until imported',
    }
    rows = [("start", "seconds", "until it was printed")]
    for name, label in labels.items():
        told = printed[name].text(2) if name in printed else ""
        rows.append((label, seconds[name].text(2), told))
    faster = seconds["nbconvert"].over(seconds["warm"])
    fresh = seconds["fresh"].over(seconds["import"])
    cold = seconds["cold"].over(seconds["import"])
    goals = [
        ("goal", "measured", ""),
        ("preloaded ≤ 0.1 s", f"{seconds['warm'].median():.2f} s", met(seconds["warm"], most=0.1)),
        (
            "preloaded at least 20 × faster than nbconvert and python",
            f"{faster.text(1)} ×",
            met(faster, least=20.0),
        ),
        ("--cold ≤ 1.2 × import torch_xla", f"{fresh.text(2)} ×", met(fresh, most=1.2)),
        ("the first in a new kernel ≤ 1.0 ×", f"{cold.text(2)} ×", met(cold, most=1.0)),
    ]
    head = (
        f"Start: from sending the train cell, or from starting the command, to the first line "
        f"of a rank at the client; {RANKS} ranks."
    )
    return f"{head}\n\n{table(rows)}\n\n{table(goals)}"
