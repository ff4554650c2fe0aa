"""Find changes by left-out cells to names that the run reads: reported, not refused.

The run has such a name with the value that a cell above gave it: a train cell should have returned
it but did not, or a call of `tpunb.launch` changed it. Changes by other cells are described when
a run begins (`tpunb.kernel.current_parameters`).
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator

from tpunb.notebook.convert.cells import parse_body
from tpunb.notebook.convert.names import LeftOutCell, RunCells, missing_returns
from tpunb.notebook.models import Absent, LeftOut, MissingChange
from tpunb.notebook.scopes import (
    DefinedFunction,
    Frame,
    FunctionOrClass,
    ParsedCell,
    Scopes,
    Site,
    changed_names,
    first_name,
)


def find_missing_changes(
    run: RunCells, left_out: Iterable[LeftOutCell], held: Container[str] = ()
) -> list[MissingChange]:
    """Return one entry for each name and cell, in the order of the cells.

    The last cell of the run is the train cell. `held`: names that the run gets from the kernel.
    """
    gaps = [(cell, gone) for cell in left_out if (gone := dict(_gone(cell)))]
    if not gaps or not run.cells:
        return []
    cells = run.scopes.cells
    reads = _Reads(run.scopes)
    found = []
    for cell, gone in sorted(gaps, key=lambda gap: gap[0].place):
        below = sum(piece.index < cell.place for piece in cells)
        above = set().union(*map(run.scopes.bound, cells[:below]))
        for name in sorted(gone.keys() & above):
            reader = reads.first(name, below)
            last = reader is cells[-1]
            if reader is not None and not (last and name in held):
                who = "the train cell" if last else f"cell [{reader.number}]"
                found.append(MissingChange(name, cell.label, who, gone[name]))
    return found


def _gone(cell: LeftOutCell) -> Iterator[tuple[str, Absent | None]]:
    if cell.reason is LeftOut.LAUNCH:
        changed = changed_names(parse_body(cell.source)[0])
        yield from ((name, None) for name in changed - cell.got.names)
    else:
        yield from missing_returns(cell).items()


class _Reads:
    """Finds the names that each cell reads, directly or through functions that it mentions."""

    def __init__(self, names: Scopes) -> None:
        self._names = names
        self._now: dict[ParsedCell, list[Site]] = {}
        self._later: dict[str, set[str]] = {}
        """The names that each function and each class at the top level reads."""
        owners: list[ParsedCell | DefinedFunction] = [*names.cells, *names.functions]
        for site in (site for owner in owners for site in names.reads(owner)):
            definition = _definition(site.frame)
            if definition:
                self._later.setdefault(definition, set()).add(first_name(site.node))
            else:
                self._now.setdefault(site.cell, []).append(site)

    def first(self, name: str, begin: int) -> ParsedCell | None:
        """Return the first cell from `begin` on that reads a name before it is bound again."""
        for cell in self._names.cells[begin:]:
            bound = [
                _statement(one.node, cell)
                for one in self._names.globals.bindings.get(name, ())
                if one.frame.cell is cell and not one.changes
            ]
            first = min(bound, default=len(cell.tree.body))
            for site in self._now.get(cell, ()):
                before = _statement(site.node, cell) <= first
                if before and name in self._with_functions(first_name(site.node)):
                    return cell
            if bound:
                return None
        return None

    def _with_functions(self, name: str) -> set[str]:
        every: set[str] = set()
        todo = {name}
        while todo:
            every |= todo
            todo = set().union(*(self._later.get(each, set()) for each in todo)) - every
        return every


def _definition(frame: Frame | None) -> str:
    """The outermost function or class around a node; '' for code that runs with its cell."""
    name = ""
    while frame is not None:
        name = frame.node.name if isinstance(frame.node, FunctionOrClass) else name
        frame = frame.parent
    return name


def _statement(node: ast.AST, cell: ParsedCell) -> int:
    """The position, among the statements at the top level of a cell, of the one around a node."""
    at = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
    return sum((part.lineno, part.col_offset) <= at for part in cell.tree.body) - 1
