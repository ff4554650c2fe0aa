"""Explains a NameError in the kernel for a name that a train cell has assigned in its ranks."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpunb.notebook.convert import statements
from tpunb.utils.names_read import names_read

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
        """After a cell: print how the notebook gets the name that it lacked."""
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
        for name in sorted(statements.bound_names(tree)):
            node = _definition(tree, name)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield name, f"`{name}` was imported {where}: import it in this notebook's cells too"
            elif isinstance(node, statements.FunctionOrClass):
                yield name, f"`{name}` was defined {where}: define it in a cell above"
            else:
                yield name, f"`{name}` was assigned {where}: `--returns {name}` brings it"


def _definition(tree: ast.Module, name: str) -> ast.AST | None:
    """Return the import, function or class that binds a name; None for an assignment."""
    for node in statements.executed(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if any((each.asname or each.name.partition(".")[0]) == name for each in node.names):
                return node
        elif isinstance(node, statements.FunctionOrClass) and node.name == name:
            return node
    return None


def _reads(source: str, name: str) -> bool:
    """True if a cell reads a name that it does not bind."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a magic of IPython's
        return False
    return name in names_read(tree, {})
