"""The lines of a cell around the one where a run has failed."""

from __future__ import annotations

from tpunb.models import Failure, RunSpec
from tpunb.rundir import RunDir

AROUND = 2
"""Lines before and after."""
LONGEST = 120


def around(failure: Failure, spec: RunSpec, run: RunDir) -> list[tuple[int, str]]:
    """Numbers in the cell, and the lines as they ran; empty if it is not known where it was."""
    blocks = [block for block in spec.blocks if block.number == failure.cell]
    if failure.cell is None or failure.line is None or not blocks or not run.script.exists():
        return []
    block = blocks[0]
    lines = run.script.read_text(encoding="utf-8").split("\n")
    at = block.first + failure.line - 1
    if not block.first <= at <= block.last:
        return []
    numbers = range(max(block.first, at - AROUND), min(block.last, at + AROUND) + 1)
    return [(number - block.first + 1, lines[number - 1][:LONGEST]) for number in numbers]
