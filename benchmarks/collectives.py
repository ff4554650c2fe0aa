"""Time of a rehearsal's collectives compared with bare gloo, and memory of each extra rank."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks.commands import run, torchrun
from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table

SCRIPT = Path(__file__).with_name("exchange.py")
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1"}
"""Environment of each rank. XLA reads NPROC for its thread pools."""
PAIRS = {
    "all-reduce of 100 MB": ("large", "large bare", 1.5),
    "… of 100 × 10 kB, one call": ("list", "list bare", 2.0),
    "… of 100 × 10 kB, 100 calls": ("calls", "calls bare", 3.0),
    "ZeRO-1 of MNIST, beside plain": ("zero1", "zero1 plain", 3.0),
}
WORDS = "megabytes:"
DATA = """\
import torch

data = torch.ones({batches}, 2500, 1000)"""
TRAIN = f"""\
%%tpu_train --cores {{ranks}}
import os
import re

import torch
import torch_xla
import torch_xla.core.xla_model as xm

model = torch.nn.Linear(1000, 100).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(len(data)):
    optimizer.zero_grad()
    model(data[step].to("xla")).square().mean().backward()
    xm.optimizer_step(optimizer)
    torch_xla.sync()


def megabytes(pid, kind):
    rollup = open(f"/proc/{{pid}}/smaps_rollup").read()
    return sum(int(size) for size in re.findall(rf"^{{kind}}: +(\\d+)", rollup, re.M)) / 1000


xm.rendezvous("trained")
own = megabytes("self", "Private_(?:Clean|Dirty)"), megabytes("self", "Pss")
agent = megabytes(os.getppid(), "Pss")
xm.rendezvous("measured")
print("{WORDS}", *own, agent)"""


def measure(folder: Path, rounds: int) -> str:
    """Measure collectives of 2 and of 4 ranks, and memory with 2 GB in the prelude."""
    tables = [_exchange(folder, n, rounds, ["reductions", "steps", "zero1"]) for n in (2, 4)]
    return "\n\n".join([*tables, _memory(folder, rounds, 2000)])


def measure_a_little(folder: Path) -> str:
    """The quick form of `measure`."""
    return "\n\n".join([_exchange(folder, 2, 1, ["zero1"]), _memory(folder, 1, 20)])


def _exchange(folder: Path, ranks: int, rounds: int, names: list[str]) -> str:
    command = [*torchrun(ranks, str(SCRIPT)), str(rounds), *names]
    text = run(command, folder, env=ONE_THREAD).text
    (line,) = [line for line in text.splitlines() if line.startswith("[{")]
    found: dict[str, Samples] = {}
    for each in json.loads(line):
        for name, times in each.items():
            found.setdefault(name, Samples()).add(times)
    rows = [("", "rehearsal", "bare", "ratio", "goal")]
    for label, (name, bare, goal) in PAIRS.items():
        if name in found:
            mine, theirs = found[name], found[bare]
            ratio = mine.over(theirs)
            rows.append(
                (label, mine.text(1), theirs.text(1), ratio.text(2), _goal(ratio, goal, ranks))
            )
    if "step together" in found:
        together, bare = found["step together"], found["step bare"]
        for label, name in (("one rank's", "step alone"), ("the same cut in two", "step cut")):
            extra = together.minus(found[name])
            ratio = extra.over(bare)
            rows.append(
                (
                    f"step of 25 million, more than {label}",
                    *(extra.text(1), bare.text(1), ratio.text(2), _goal(ratio, 1.5, ranks)),
                )
            )
    return (
        f"Collectives: milliseconds with {ranks} ranks of one thread each, and of bare gloo with\n"
        "the same bytes.\n\n" + table(rows)
    )


def _goal(ratio: Samples, most: float, ranks: int) -> str:
    """The goal and whether it is met, for 2 ranks; there are none for more."""
    return f"≤ {most}: {met(ratio, most=most)}" if ranks == 2 else ""


def _memory(folder: Path, rounds: int, megabytes: int) -> str:
    sources = ["%load_ext tpunb", DATA.format(batches=megabytes // 10), TRAIN]
    notebook = folder / "memory.ipynb"
    nb = v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources])
    nbformat.write(nb, notebook)
    rows = [("ranks", "private of a rank", "runner and ranks", "each more rank", "goal")]
    first = Samples()
    with Kernel(notebook) as kernel:
        kernel.cell(0)
        kernel.cell(1)
        for ranks in (1, 2, 4):
            private, together = Samples(), Samples()
            for _ in range(rounds):
                kernel.do(f"ranks = {ranks}")
                lines = [line for line in kernel.cell(2).printed().splitlines() if WORDS in line]
                numbers = [
                    [float(word) for word in line.partition(WORDS)[2].split()] for line in lines
                ]
                private.add([own for own, _, _ in numbers])
                together.add([sum(pss for _, pss, _ in numbers) + numbers[0][2]])
            row = [str(ranks), private.text(0), together.text(0), "", ""]
            if ranks == 1:
                first = together
            else:
                rounds_more = together.minus(first).rounds
                more = Samples([[value / (ranks - 1) for value in each] for each in rounds_more])
                row[3:] = more.text(0), f"≤ 400: {met(more, most=400)}"
            rows.append(tuple(row))
    return (
        f"Memory: megabytes after training on {megabytes / 1000:g} GB that the prelude has\n"
        "loaded. For runner and ranks together, each page counts once (PSS).\n\n" + table(rows)
    )
