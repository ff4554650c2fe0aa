"""Finds lines of the notebook's cells in the files that a run's processes have compiled.

These are the run's own `script.py` and, for cells that ran in a prelude that was kept from another
run, the `script.py` of that one (`Block.origin`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Block, RunSpec
from tpunb.utils import records


def read_cell(run: RunDir, block: Block) -> Mapping[str, Any]:
    """The cell of a block, as `notebook.json` has it; empty if it has not."""
    try:
        cells = records.read(run.snapshot)["cells"]
        cell = cells[block.cell]
    except (OSError, ValueError, LookupError, TypeError):  # a crash has left half a file
        return {}
    return cell if isinstance(cell, dict) else {}


def read_block(run: RunDir, block: Block) -> list[str]:
    """The lines of a block as its cell has them: `%%tpu_train` and `!ls`, not what became of them.

    Where the cell is not known line for line, as they ran.
    """
    ran = run.script.read_text(encoding="utf-8").split("\n")[block.first - 1 : block.last]
    own = str(read_cell(run, block).get("source", "")).split("\n")
    return own if len(own) == len(ran) else ran


class CellLines:
    """The way from a file and a line of a traceback to a cell and its line."""

    def __init__(self, script: Path | str, spec: RunSpec) -> None:
        self.script = str(script)
        self._spec = spec
        self._kept: dict[str, list[tuple[int, Block]]] = {}
        for block in spec.blocks:
            if block.origin is not None:
                file, first = block.origin
                self._kept.setdefault(file, []).append((first, block))

    def __contains__(self, file: object) -> bool:
        """Whether a file holds cells of this run."""
        return file == self.script or file in self._kept

    @property
    def files(self) -> tuple[str, ...]:
        """All files that hold cells of this run."""
        return (self.script, *self._kept)

    def script_line(self, file: str, line: int) -> int | None:
        """The line of the run's own script; None for a line that is none of its cells'."""
        if file == self.script:
            return line
        for first, block in self._kept.get(file, ()):
            if first <= line <= first + block.last - block.first:
                return block.first + line - first
        return None

    def locate(self, file: str, line: int) -> tuple[int | None, int | None]:
        """The cell's number and the line within it (from 1); None and None for no cell's line."""
        own = self.script_line(file, line)
        return (None, None) if own is None else self._spec.locate(own)

    def describe(self, file: str, line: int) -> str:
        """'cell [7], line 3'."""
        own = self.script_line(file, line)
        return f"line {line} of {Path(file).name}" if own is None else self._spec.describe_line(own)
