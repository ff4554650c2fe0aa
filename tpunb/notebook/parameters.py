"""Papermill parameters of a notebook: their names, defaults and types."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpunb.notebook.convert.syntax import parsed
from tpunb.notebook.files import load_cells
from tpunb.notebook.models import Cell, Snapshot
from tpunb.notebook.parsing import parse_cells
from tpunb.notebook.scopes import bound_names
from tpunb.utils.errors import TpunbError


def parameter(text: str) -> Any:
    """Parse a parameter as a Python literal (3, 1e-3, True, [1, 2]), otherwise as text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def refuse_unknown(notebook: Path, names: Iterable[str], option: str = "-p") -> None:
    """Raise TpunbError for a parameter without effect, whose value no cell would use.

    papermill puts the values below the cell tagged `parameters`, or above all cells. A name that
    a cell reads and no cell assigns is a parameter, too.
    """
    cells = load_cells(notebook)
    tagged = {cell.index for cell in cells if "parameters" in cell.tags}
    injected = {cell.index for cell in cells if "injected-parameters" in cell.tags}
    parsed = parse_cells(Snapshot(cells, None, str(notebook), "the notebook file"))
    known: set[str] = set()
    assigned: set[str] = set()
    read: set[str] = set()
    for cell in parsed:
        if cell.index in tagged:
            known |= bound_names(cell.tree)
        elif cell.index not in injected:
            assigned |= bound_names(cell.tree)
            read |= set(re.findall(r"[^\W\d]\w*", "\n".join(cell.lines)))
    for name in names:
        if name in known or (name in read and name not in assigned):
            continue
        nearest = difflib.get_close_matches(name, sorted(known), 1, 0.6)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        if not tagged:
            hint = ": no cell of it is tagged `parameters`; tag the one that assigns the defaults"
        elif not hint:
            hint = f"; its parameters are: {', '.join(sorted(known)) or 'none'}"
        raise TpunbError(f"{option} {name}: {notebook} has no such parameter{hint}")


def literal_values(snapshot: Snapshot) -> dict[str, Any]:
    """Values of parameters where the train cell runs, by name: literals, maybe of papermill's cell.

    Parameters that other cells above assign too are left out: their value is known only in a run.
    """
    above = snapshot.cells[: snapshot.train]
    tags = ("parameters", "injected-parameters")
    known = _literals(above, tags)
    for cell in parse_cells(replace(snapshot, cells=above, train=None)):
        if not set(tags) & set(above[cell.index].tags):
            for name in bound_names(cell.tree):
                known.pop(name, None)
    return known


def _literals(cells: Iterable[Cell], tags: Iterable[str]) -> dict[str, Any]:
    """Literals that cells with one of these tags assign at their top level, by name.

    Other values, such as expressions, are left out: their type is known only when they run.
    """
    found: dict[str, Any] = {}
    for cell in cells:
        tree = parsed([cell.source]) if set(tags) & set(cell.tags) else None
        for node in tree.body if tree else ():  # else it has an IPython magic
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets, value = [node.target], node.value
            else:
                continue
            for target in targets:
                if isinstance(target, ast.Name):
                    try:
                        found[target.id] = ast.literal_eval(value)
                    except (ValueError, TypeError, SyntaxError):
                        found.pop(target.id, None)
    return found
