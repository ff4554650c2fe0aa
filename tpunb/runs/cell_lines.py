"""Find lines of the notebook's cells in the files that a run's processes have compiled.

These are the run's own `script.py` and, for cells that ran in a prelude kept from another run, the
`script.py` of that run (`Block.origin`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Block, RunSpec
from tpunb.utils import records


def read_cell(run: RunDir, block: Block) -> Mapping[str, Any]:
    """Return the cell of a block from `notebook.json`; {} if it is not there."""
    try:
        cells = records.read(run.snapshot)["cells"]
        cell = cells[block.cell]
    except (OSError, ValueError, LookupError, TypeError):  # a crash has left half a file
        return {}
    return cell if isinstance(cell, dict) else {}


def read_block(run: RunDir, block: Block) -> list[str]:
    """Return the lines of a block as written in its cell: `%%tpu_train` and `!ls`, not converted.

    If the cell is not known line for line, return the converted lines.
    """
    ran = run.script.read_text(encoding="utf-8").split("\n")[block.first - 1 : block.last]
    own = str(read_cell(run, block).get("source", "")).split("\n")
    return own if len(own) == len(ran) else ran


class CellLines:
    """Maps a file and line of a traceback to a cell and its line."""

    def __init__(self, script: Path | str, spec: RunSpec) -> None:
        self.script = str(script)
        self._spec = spec
        self._kept: dict[str, list[tuple[int, Block]]] = {}
        for block in spec.blocks:
            if block.origin is not None:
                file, first = block.origin
                self._kept.setdefault(file, []).append((first, block))

    def __contains__(self, file: object) -> bool:
        """True if a file holds cells of this run."""
        return file == self.script or file in self._kept

    @property
    def files(self) -> tuple[str, ...]:
        """All files that hold cells of this run."""
        return (self.script, *self._kept)

    def script_line(self, file: str, line: int) -> int | None:
        """Return the line in the run's own script; None if it belongs to no cell of the run."""
        if file == self.script:
            return line
        for first, block in self._kept.get(file, ()):
            if first <= line <= first + block.last - block.first:
                return block.first + line - first
        return None

    def locate(self, file: str, line: int) -> tuple[int | None, int | None]:
        """Return the cell's number and the line in it, from 1; (None, None) if it is in no cell."""
        own = self.script_line(file, line)
        return (None, None) if own is None else self._spec.locate(own)

    def describe(self, file: str, line: int) -> str:
        """Return 'cell [7], line 3'."""
        own = self.script_line(file, line)
        return f"line {line} of {Path(file).name}" if own is None else self._spec.describe_line(own)
