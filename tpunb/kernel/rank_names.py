"""Explains a NameError in the kernel for a name that a train cell has assigned in its ranks."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpunb.notebook.scopes import FunctionOrClass, scopes_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult

    from tpunb.kernel.pipeline import PreparedNotebook


@dataclass
class RankNames:
    """The names that train cells of this kernel have assigned, which only their ranks have."""

    _hints: dict[str, str] = field(default_factory=dict)
    """For each name, how the notebook gets it."""

    def note_run(self, notebook: PreparedNotebook, brought: Iterable[str]) -> None:
        """Remember what the train cell assigns; `brought`: what the run returns."""
        for name, hint in _hints_of(notebook):
            self._hints[name] = hint
        for name in brought:
            self._hints.pop(name, None)

    def explain(self, result: ExecutionResult | None) -> None:
        """After a NameError in a cell: print how the notebook can get this name."""
        error = None if result is None else result.error_in_exec
        if type(error) is NameError and (hint := self._hints.get(error.name or "")):
            print(hint)


def missing_below(
    notebook: PreparedNotebook, brought: Iterable[str], held: Container[str]
) -> Iterator[str]:
    """Yield a line for each name that only the ranks have and a cell below the train cell reads.

    `brought`: the names that the run returns; `held`: those that the kernel has.
    """
    snapshot, trained = notebook.snapshot, {*brought}
    if snapshot.train is None:
        return
    for name, hint in _hints_of(notebook):
        if name in trained or name in held:
            continue
        for cell in snapshot.cells[snapshot.train + 1 :]:
            if cell.kind == "code" and _reads(cell.source, name):
                yield f"{hint} ({snapshot.label(cell)} reads it)"
                break


def _hints_of(notebook: PreparedNotebook) -> Iterator[tuple[str, str]]:
    """Yield the names that the train cell binds, and for each how the notebook gets it."""
    script = notebook.script
    for block in script.blocks:
        if block.role != "train":
            continue
        tree = ast.parse(script.source(block))
        where = f"in the ranks of cell [{block.number}]"
        scopes = scopes_of(tree)
        for name in sorted(scopes.bound(scopes.cells[0])):
            nodes = [binding.node for binding in scopes.globals.bindings[name]]
            if any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes):
                yield name, f"`{name}` was imported {where}: import it in this notebook's cells too"
            elif any(isinstance(node, FunctionOrClass) for node in nodes):
                yield name, f"`{name}` was defined {where}: define it in a cell above"
            else:
                yield name, f"`{name}` was assigned {where}: `--returns {name}` brings it"


def _reads(source: str, name: str) -> bool:
    """True if a cell reads a name that it does not bind."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a magic of IPython's
        return False
    return scopes_of(tree).needs(name)
