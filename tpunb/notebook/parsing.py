"""Parse the code cells of a notebook, each with its part in a run."""

from __future__ import annotations

import ast
import re

from tpunb.notebook.convert.cells import plain_python, skip_reason
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Cell, Snapshot
from tpunb.notebook.scopes import KNOWN, ParsedCell, Part, Problem

DEBUG = re.compile(r"^%%tpu_debug\b", re.MULTILINE)


def parse_cells(snapshot: Snapshot) -> list[ParsedCell]:
    """Parse the code cells of a snapshot, in order. See `KnownCells`."""
    KNOWN.begin()
    parsed = []
    code = [cell for cell in snapshot.cells if cell.kind == "code"]
    heads = {cell.index: cell_magics(cell.source) for cell in code if "%%" in cell.source}
    trains = {index for index, names in heads.items() if "tpu_train" in names}
    if snapshot.train is not None:
        trains.add(snapshot.train)
    last = max(trains, default=None)
    for position, cell in enumerate(code, 1):
        names = heads.get(cell.index, [])
        part: Part = "prelude"
        if cell.index in trains:
            part = "train"
        elif (
            "tpu_debug" in names
            or skip_reason(cell.source, cell.tags) is not None
            or (last is not None and cell.index > last)
        ):
            part = "kernel"
        end = snapshot.train
        runs = end is not None and (cell.index == end or (part == "prelude" and cell.index < end))
        number = position if cell.number is None else cell.number
        parsed.append(_parse_cell(cell, number, part, runs))
    return parsed


def _parse_cell(cell: Cell, number: int, part: Part, runs: bool) -> ParsedCell:
    source = cell.source.replace("\r\n", "\n").replace("\r", "\n")
    lines = source.split("\n")
    parsed = ParsedCell(cell.index, ast.Module([], []), number, part, runs, lines)
    try:
        # The body of a %%tpu_debug cell is ordinary code too, though never part of a script.
        plain = plain_python(DEBUG.sub("%%tpu_train", source, count=1), train=part == "train")
    except NotPythonError as error:
        parsed.problem = Problem(error.line, error.reason, kernel_runs_it=True)
        return parsed
    try:
        parsed = KNOWN.parse("\n".join(plain.lines), cell.index, number, lines)
        parsed.part, parsed.runs, parsed.plain = part, runs, list(plain.lines)
    except SyntaxError as error:
        line = min(max(error.lineno or 1, 1), len(parsed.lines))
        parsed.problem = Problem(line, f"it is not Python: {error.msg}")
    except (ValueError, MemoryError, RecursionError, OverflowError) as error:
        parsed.problem = Problem(1, f"Python cannot read it: {error}")
    parsed.left_out = sorted(line for line, _, _ in plain.left_out)
    return parsed
