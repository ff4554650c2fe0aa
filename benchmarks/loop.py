"""A notebook that is edited and run again and again, in three ways.

It reads the text of Python's own documentation, cleans and tokenises it, and makes tables and
plots, in about 20 seconds. Then its train cell runs on two ranks: with `%%tpu_train`, with
accelerate's notebook_launcher in the same kernel, and with nbconvert and python.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import v4

from benchmarks.commands import JUPYTER, PYTHON, run
from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table
from tests.support import is_kept
from tpunb.runs.directory import list_runs
from tpunb.runs.events import Phase
from tpunb.runs.spec import PhaseKind
from tpunb.utils.text import size

RANKS = 2
WORDS = "is here at"


class Work(NamedTuple):
    """The amount of work of the prelude."""

    files: int
    """Number of files of the standard library that are read."""
    merges: int
    """Number of merges of the tokeniser."""
    data: int
    """Bytes of data in the prelude of the second notebook."""


MUCH = Work(800, 600, 4_000_000_000)
LITTLE = Work(40, 4, 40_000_000)

SETUP = "%load_ext tpunb\n%tpu_setup"
PARAMETERS = "rate = 0.1"
IMPORTS = """\
import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch"""
READ = """\
from pydoc_data.topics import topics

library = Path(sysconfig.get_path("stdlib"))
others = {{"site-packages", "test", "tests"}}
files = [file for file in sorted(library.rglob("*.py")) if not others & set(file.parts)]
texts = [("pydoc", name, text) for name, text in topics.items()]
kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
for file in files[:{files}]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            texts.append((file.stem, getattr(node, "name", ""), text))
print(f"{{len(texts):,}} texts")"""
CLEAN = """\
table = pd.DataFrame(texts, columns=["module", "name", "text"])
table["text"] = [re.sub(r"[^a-z' ]+", " ", text.lower()) for text in table.text]
table = table[table.text.str.len() > 20].drop_duplicates("text").reset_index(drop=True)"""
TOKENISE = """\
counts = Counter(word for text in table.text for word in text.split())
words = {{word: list(word) for word in counts}}
for _ in range({merges}):  # byte-pair encoding
    pairs = Counter()
    for word, parts in words.items():
        for pair in zip(parts, parts[1:]):
            pairs[pair] += counts[word]
    best = max(pairs, key=lambda pair: (pairs[pair], pair))
    for parts in words.values():
        for at in range(len(parts) - 2, -1, -1):
            if (parts[at], parts[at + 1]) == best:
                parts[at : at + 2] = ["".join(best)]
pieces = sorted({{part for parts in words.values() for part in parts}})
number = {{piece: at for at, piece in enumerate(pieces)}}"""
TABLES = """\
table["words"] = table.text.str.split().str.len()
table["pieces"] = [sum(len(words[word]) for word in text.split()) for text in table.text]
by_module = table.groupby("module")[["words", "pieces"]].sum()
longest = by_module.sort_values("words", ascending=False).head(20)"""
PLOT = """\
fig, axes = plt.subplots(1, 2, figsize=(10, 4))
axes[0].hist(np.log10(table["words"]), bins=40)
axes[1].barh(longest.index, longest["words"])
plt.show()"""
LOOK = "longest"
MODEL = """\
ids = torch.tensor([number[part] for text in table.text for w in text.split() for part in words[w]])
torch.manual_seed(0)
size = len(pieces)
model = torch.nn.Sequential(torch.nn.Embedding(size, 32), torch.nn.Linear(32, size))"""
TRAIN = f"""\
import os
import time
print(f"rank {{os.environ.get('RANK', 0)}} {WORDS} {{time.monotonic():.3f}}", flush=True)
loss = torch.nn.functional.cross_entropy(model(ids[:8]), ids[1:9])
print(f"{{loss.item() * rate:.3f}}")"""
ACCELERATE = "from accelerate import notebook_launcher\n\n\ndef train():\n{}\n\n\n" + (
    f"notebook_launcher(train, num_processes={RANKS})"
)
DATA = "import torch\n\ndata = torch.ones({count})"
HERE = f"""\
import os
import time
print(f"rank {{os.environ.get('RANK', 0)}} {WORDS} {{time.monotonic():.3f}}", flush=True)"""


def measure(folder: Path, rounds: int, work: Work = MUCH) -> str:
    """Measure everything alternately, `rounds` times; returns tables."""
    loop = Loop(folder, work)
    for _ in range(rounds):
        loop.once()
    return loop.report()


class Loop:
    """The measurements; each round has its own kernels."""

    def __init__(self, folder: Path, work: Work) -> None:
        self._folder = folder
        self._work = work
        self._tpunb: dict[str, Samples] = {}
        self._accelerate: dict[str, Samples] = {}
        self._kernel: dict[str, Samples] = {}
        """Seconds of the edited cells in the kernel, which a user waits for before the run."""
        self._numbers: dict[str, Samples] = {}

    def once(self) -> None:
        """Measure everything once."""
        code = [IMPORTS, READ.format(files=self._work.files), CLEAN]
        code += [TOKENISE.format(merges=self._work.merges), TABLES, PLOT, LOOK, MODEL]
        with _kernel(self._folder / "loop.ipynb", [SETUP, PARAMETERS, *code], TRAIN) as made:
            self._run_loop(made)
        elements = self._work.data // 4
        large = [SETUP, DATA.format(count=elements)]
        with _kernel(self._folder / "large.ipynb", large, HERE) as made:
            for index in range(len(large)):
                made.cell(index)
            made.wait_until_warm()
            self._launch(made, "", len(large))
            self._launch(made, f"nothing, and {size(self._work.data)} in the prelude", len(large))
        self._add(self._numbers, "nbconvert", self._nbconvert([PARAMETERS, *code, TRAIN]))

    def _run_loop(self, kernel: Kernel) -> None:
        train = len(kernel.cells) - 2
        for index in range(train):
            kernel.cell(index)
        kernel.wait_until_warm()
        self._launch(kernel, "first run", train)
        self._compare_preludes()
        edits: list[tuple[str, int | None, str, str, range]] = [
            ("the train cell", train, "loss = ", "loss = 2 * ", range(0)),
            ("the last cell above it", train - 1, "32", "48", range(train - 1, train)),
            ("a cell in the middle", 4, "> 20", "> 30", range(4, train)),
            ("nothing", None, "", "", range(0)),
            ("a parameter, in a cell below", None, "", "", range(0)),
            ("a parameter, in its cell", 1, "0.1", "0.05", range(1, 2)),
        ]
        for name, index, old, new, again in edits:
            if index is not None:
                edited = list(kernel.cells)[index]
                assert old in kernel.cells[edited]
                kernel.cells[edited] = kernel.cells[edited].replace(old, new)
            began = time.monotonic()
            for each in again:
                kernel.cell(each)
            if "below" in name:
                kernel.run("rate = 0.2", "below", saved=False)
            self._add(self._kernel, name, time.monotonic() - began)
            self._launch(kernel, name, train)
        kept = [process.pid for process in kernel.processes() if is_kept(process)]
        own = max((_private(pid) for pid in kept), default=0)
        self._add(self._numbers, "private", float(own))
        self._add(self._numbers, "kept", float(sum(map(_private, kept))))
        self._add(self._numbers, "resident", float(_private(kernel.pid)))

    def _launch(self, kernel: Kernel, name: str, train: int) -> None:
        """Run the cell of each way; the times are added only if there is a name."""
        for ways, index in ((self._tpunb, train), (self._accelerate, train + 1)):
            ran = kernel.cell(index, await_words=[WORDS])
            # Counted as words: there may be no newline between them when two ranks write at once.
            assert ran.printed().count(WORDS) == RANKS, ran.printed()
            assert ran.found is not None
            if name:
                self._add(ways, name, ran.found - ran.sent)

    def _compare_preludes(self) -> None:
        """Add the seconds of the prelude's cells in the run, and in the kernel."""
        run_folder = list_runs(self._folder / "runs")[-1]
        known = {block.number: block.seconds for block in run_folder.read_spec().blocks}
        phases = [event for event in run_folder.read_events() if isinstance(event, Phase)]
        compared = [
            (after.time - phase.time, known[phase.cell] or 0.0)
            for phase, after in pairwise(phases)
            # The fork server has done the imports before.
            if phase.kind is PhaseKind.PRELUDE and (phase.position or 0) > 3
        ]
        self._add(self._numbers, "prelude", sum(took for took, _ in compared))
        self._add(self._numbers, "in kernel", sum(took for _, took in compared))

    def _nbconvert(self, cells: list[str]) -> float:
        _write(self._folder / "plain.ipynb", cells)
        started = time.monotonic()
        run([JUPYTER, "nbconvert", "--to", "python", "plain.ipynb"], self._folder)
        env = {"MPLBACKEND": "agg"}
        first = run([PYTHON, "plain.py"], self._folder, await_words=WORDS, env=env).first
        assert first is not None
        return first - started

    @staticmethod
    def _add(samples: dict[str, Samples], name: str, value: float) -> None:
        samples.setdefault(name, Samples()).add([value])

    def report(self) -> str:
        """The tables."""
        numbers, theirs = self._numbers, self._accelerate
        rows = [("edited", "in the kernel first", "%%tpu_train", "notebook_launcher", "nbconvert")]
        for name, seconds in self._tpunb.items():
            before = self._kernel[name].text(2) if name in self._kernel else ""
            plain = "" if "prelude" in name else numbers["nbconvert"].text(1)
            rows.append((name, before, seconds.text(2), theirs[name].text(2), plain))
        kept, large = self._tpunb["nothing"], self._tpunb[list(self._tpunb)[-1]]
        last = self._tpunb["the last cell above it"]
        over = last.minus(self._kernel["the last cell above it"])
        ratio = kept.over(theirs["nothing"])
        computing = numbers["prelude"].over(numbers["in kernel"])
        goals = [
            ("goal", "measured", ""),
            ("nothing edited ≤ 0.25 s", f"{kept.text(2)} s", met(kept, most=0.25)),
            ("… ≤ 2 × notebook_launcher", f"{ratio.text(1)} ×", met(ratio, most=2.0)),
            ("… with much data ≤ 0.5 s", f"{large.text(2)} s", met(large, most=0.5)),
            ("last cell edited ≤ its time + 0.3 s", f"{over.text(2)} s", met(over, most=0.3)),
            ("computing ≤ 1.1 × the kernel's", f"{computing.text(2)} ×", met(computing, most=1.1)),
        ]
        prelude, in_kernel = numbers["prelude"].median(), numbers["in kernel"].median()
        memory = {n: size(int(numbers[n].median())) for n in ("private", "kept", "resident")}
        return (
            "The loop: seconds from sending the train cell, or starting nbconvert, to the first "
            f"line of a rank; {RANKS} ranks. The prelude took {prelude:.1f} s, and its cells took "
            f"{in_kernel:.1f} s in the kernel. Kept preludes have {memory['kept']} of private "
            f"memory, the largest {memory['private']}; the kernel has "
            f"{memory['resident']}.\n\n{table(rows)}\n\n{table(goals)}"
        )


@contextmanager
def _kernel(path: Path, cells: list[str], train: str) -> Iterator[Kernel]:
    """A kernel with a notebook whose last two cells launch the same ranks in two ways."""
    body = "\n".join(f"    {line}" for line in train.split("\n"))
    launch = f"%%tpu_train --cores {RANKS}\n{train}"
    with Kernel(_write(path, [*cells, launch, ACCELERATE.format(body)])) as kernel:
        # accelerate imports torch_xla, which sets environment variables that a run would inherit.
        kernel.do("import accelerate")
        yield kernel


def _write(path: Path, sources: list[str]) -> Path:
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(text) for text in sources]), path)
    return path


def _private(pid: int) -> int:
    """Bytes of a process's private memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
