"""Small notebooks for tests, and the scripts made of them run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tpunb.notebook.models import Cell, CellKind, Script, Snapshot

KINDS: dict[str, CellKind] = {"markdown": "markdown", "raw": "raw"}

WITHOUT_TPUNB = """\
import runpy, sys
sys.modules["tpunb"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def notebook(*sources: str, train: int | None = -1, path: str | None = "nb.ipynb") -> Snapshot:
    """A notebook of code cells that ran in order; 'markdown: text' and 'raw: text' are such."""
    cells: list[Cell] = []
    number = 0
    for index, source in enumerate(sources):
        head, _, text = source.partition(": ")
        if head in KINDS:
            cells.append(Cell(index, KINDS[head], text))
        else:
            number += 1
            cells.append(Cell(index, "code", source, number))
    place = None if train is None else train % len(cells)
    return Snapshot(tuple(cells), place, path, "a test")


def run(script: Script, folder: Path, *, tpunb: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a script as `python script.py` does, where tpunb is installed or not."""
    path = folder / "made" / "script.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(script.text, encoding="utf-8")
    code = [] if tpunb else ["-c", WITHOUT_TPUNB]
    return subprocess.run(
        [sys.executable, "-I", *code, str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def lines_of(script: Script, cell: int) -> list[str]:
    """The lines of a cell in a script, by its index."""
    (block,) = [block for block in script.blocks if block.cell == cell]
    return script.text.split("\n")[block.first - 1 : block.last]
