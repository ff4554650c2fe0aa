"""Where a run has failed, in the notebook: the lines around it, and the cell's id."""

from __future__ import annotations

import json
from dataclasses import replace

from tpunb.models import Block, Failure, RunSpec
from tpunb.rundir import RunDir

AROUND = 2
"""Lines before and after."""
LONGEST = 120


def placed(failure: Failure, spec: RunSpec, run: RunDir) -> Failure:
    """The same failure with the lines as they ran and the cell's id, where these are known."""
    blocks = [block for block in spec.blocks if block.number == failure.cell]
    if failure.cell is None or failure.line is None or not blocks or not run.script.exists():
        return failure
    block = blocks[0]
    return replace(failure, source=_around(block, failure.line, run), cell_id=_id(block, run))


def _around(block: Block, line: int, run: RunDir) -> tuple[tuple[int, str], ...]:
    lines = run.script.read_text(encoding="utf-8").split("\n")
    at = block.first + line - 1
    if not block.first <= at <= block.last:
        return ()
    numbers = range(max(block.first, at - AROUND), min(block.last, at + AROUND) + 1)
    return tuple((number - block.first + 1, lines[number - 1][:LONGEST]) for number in numbers)


def _id(block: Block, run: RunDir) -> str | None:
    """The id that nbformat gives the cell of a block."""
    if block.cell is None or not run.snapshot.exists():
        return None
    cells = json.loads(run.snapshot.read_text(encoding="utf-8"))["cells"]
    found: str | None = cells[block.cell]["id"] if block.cell < len(cells) else None
    return found
