"""What grows with a notebook: the first line of a run, the cells themselves, outputs, `--ahead`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import nbformat
from nbformat import v4

from benchmarks.kernel import Kernel
from benchmarks.table import Samples, met, table

CELLS = 300
OUTPUTS = 50_000_000
"""Bytes of outputs in the notebook's file."""
WORDS = "is here"
_FUNCTION = "def f{n}(x={n}):\n    return x * {n}"
_LAST = "last = {n}\nprint(last)"
_TRAIN = f"%%tpu_train --cores 2\nprint('rank {WORDS} {{n}}', flush=True)"


def measure(folder: Path, rounds: int, cells: int, outputs: int) -> str:
    """Measure all rows with these many cells and bytes of outputs; returns tables."""
    found = dict[str, Samples]()
    for number in range(rounds):
        place = folder / str(number)
        place.mkdir()
        for load in ("plain", "loaded"):
            found.setdefault(load, Samples()).add([_cells(place / f"{load}.ipynb", load, cells)])
        for what, values in _first_lines(place / "large.ipynb", cells).items():
            found.setdefault(what, Samples()).add(values)
        for what, size in (("small file", 0), ("large file", outputs)):
            took = _with_outputs(place / f"outputs{size}.ipynb", size)
            found.setdefault(what, Samples()).add(took)
        for count in (cells // 4, cells):
            took = [_ahead(place / f"ahead{count}.ipynb", count)]
            found.setdefault(f"ahead {count}", Samples()).add(took)
    return _report(found, cells, outputs)


def _sources(cells: int) -> list[str]:
    """Cells of sixteen functions each."""
    return [
        "\n".join(_FUNCTION.format(n=16 * cell + n) for n in range(16)) for cell in range(cells - 1)
    ]


def _write(path: Path, sources: list[str], outputs: int = 0) -> Path:
    cells = [v4.new_code_cell(source, id=f"cell-{at}") for at, source in enumerate(sources)]
    if outputs:
        text = json.dumps({"values": list(range(10_000))})
        shown = v4.new_output("stream", text=text * (outputs // len(text)))
        cells[1].outputs = [shown]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


def _cells(path: Path, load: str, cells: int) -> float:
    """The seconds of all cells in a kernel, one after the other."""
    first = "%load_ext tpunb" if load == "loaded" else "pass"
    with Kernel(_write(path, [first, *_sources(cells)])) as kernel:
        kernel.cell(0)
        began = time.monotonic()
        for at in range(1, cells):
            kernel.cell(at)
        return time.monotonic() - began


def _first_lines(path: Path, cells: int) -> dict[str, list[float]]:
    """The seconds to the first line of a rank: nothing edited, the train cell, the last cell."""
    setup = "%load_ext tpunb\n%tpu_setup"
    sources = [setup, *_sources(cells), _LAST.format(n=0), _TRAIN.format(n=0)]
    found: dict[str, list[float]] = {"nothing": [], "train cell": [], "last cell": []}
    with Kernel(_write(path, sources)) as kernel:
        for at in range(len(sources) - 1):
            kernel.cell(at)
        kernel.wait_until_warm()
        last, train = list(kernel.cells)[-2:]

        def first_line(what: str | None) -> None:
            ran = kernel.cell(len(sources) - 1, await_words=[WORDS])
            assert ran.found is not None
            if what is not None:
                found[what].append(ran.found - ran.sent)

        first_line(None)  # the first run of this kernel reads all cells
        for number in range(1, 6):
            first_line("nothing")
            kernel.cells[train] = _TRAIN.format(n=number)
            kernel.save()
            first_line("train cell")
            kernel.cells[last] = _LAST.format(n=number)
            kernel.save()
            kernel.cell(len(sources) - 2)
            first_line("last cell")
    return found


def _with_outputs(path: Path, outputs: int) -> list[float]:
    sources = ["%load_ext tpunb\n%tpu_setup", "pass", _TRAIN.format(n=0)]
    with Kernel(_write(path, sources, outputs)) as kernel:
        for at in range(2):
            kernel.cell(at)
        kernel.wait_until_warm()
        kernel.cell(2)
        found = []
        for _ in range(5):
            ran = kernel.cell(2, await_words=[WORDS])
            assert ran.found is not None
            found.append(ran.found - ran.sent)
        return found


def _ahead(path: Path, cells: int) -> float:
    """The seconds of a cell with `%tpu_setup --ahead`."""
    sources = ["%load_ext tpunb\n%tpu_setup --ahead", *_sources(cells)]
    with Kernel(_write(path, sources)) as kernel:
        kernel.cell(0)
        kernel.wait_until_warm()
        began = time.monotonic()
        for at in range(1, cells):
            kernel.cell(at)
        return (time.monotonic() - began) / (cells - 1)


def _report(found: dict[str, Samples], cells: int, outputs: int) -> str:
    rows = [(f"a notebook of {cells} cells of 16 functions", "seconds", "goal", "")]
    for what in ("nothing", "train cell", "last cell"):
        took = found[what]
        rows.append((f"first line, edited: {what}", took.text(2), "0.25", met(took, most=0.25)))
    ratio = found["loaded"].over(found["plain"])
    rows.append(("its cells in the kernel, without tpunb", found["plain"].text(2), "", ""))
    rows.append(("… with tpunb loaded", found["loaded"].text(2), "", ""))
    rows.append(("… ratio", ratio.text(2), "1.05 ×", met(ratio, most=1.05)))
    large = found["large file"]
    rows.append(("first line of a small notebook", found["small file"].text(2), "", ""))
    rows.append(
        (f"… with {outputs / 1e6:.0f} MB of outputs", large.text(2), "0.20", met(large, most=0.2))
    )
    few, many = found[f"ahead {cells // 4}"], found[f"ahead {cells}"]
    rows.append((f"a cell with --ahead, of {cells // 4}", few.text(3), "", ""))
    rows.append((f"… of {cells}", many.text(3), "", ""))
    ratio = many.over(few)
    rows.append(("… ratio (4 if it reads all cells)", ratio.text(2), "1.5 ×", met(ratio, most=1.5)))
    return table(rows)
