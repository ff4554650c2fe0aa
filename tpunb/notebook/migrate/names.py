"""Resolution of a notebook's names, with all cells as one program."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell, line_of
from tpunb.notebook.removed_apis import RemovedApi
from tpunb.notebook.scopes import Binding, ParsedCell, Scope, Scopes, dotted

ROOTS = ("torch_xla", "torch_xla_py")
BLOCKS = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class RemovedApiUse:
    """A use of a removed name in code, except in an import."""

    cell: CodeCell
    node: ast.expr
    row: RemovedApi
    imported: str
    """The imported dotted name through which it is reached."""
    certain: bool
    """False if the name may also refer to something that the notebook defines."""


class NotebookNames:
    """Names, scopes and parents over all cells that are Python."""

    def __init__(self, cells: Sequence[CodeCell]) -> None:
        self.cells = {cell.index: cell for cell in cells if cell.python}
        self.scopes = Scopes(ParsedCell(cell.index, cell.tree) for cell in self.cells.values())
        self.parents = self.scopes.parents
        self._cell_of: dict[ast.AST, CodeCell] = {}
        for cell in self.cells.values():
            placed = [node for node in ast.walk(cell.tree) if hasattr(node, "lineno")]
            # Sorting is stable: of nodes at one place, the outer one is first.
            placed.sort(key=attrgetter("lineno", "col_offset"))
            self._cell_of.update(dict.fromkeys(placed, cell))

    def walk(self) -> list[tuple[CodeCell, ast.AST]]:
        """Return every node with its cell, outer nodes first, in the order of the text."""
        return [(cell, node) for node, cell in self._cell_of.items()]

    def cell_of(self, node: ast.AST) -> CodeCell:
        return self._cell_of[node]

    def scope(self, node: ast.AST) -> Scope | None:
        """The scope in which a name, an import, a call or a target is."""
        return self.scopes.scopes.get(node)

    def bindings(self, node: ast.AST) -> list[Binding]:
        """The bindings that the first part of a dotted name may refer to, without `del`."""
        scope = self.scope(node)
        bound = self.scopes.bindings(dotted(node).partition(".")[0], scope) if scope else []
        return [one for one in bound if not isinstance(getattr(one.node, "ctx", None), ast.Del)]

    def references(self, name: str, scope: Scope | None) -> list[ast.expr]:
        """The nodes that read a name which code in a scope binds."""
        home = scope and scope.find(name)
        sites = self.scopes.references(name, home) if home else []
        return [site.node for site in sites if isinstance(site.node, ast.expr)]

    # Statements

    def top(self, node: ast.AST) -> ast.stmt:
        """The top-level statement that contains a node."""
        while not isinstance(parent := self.parents[node], ast.Module):
            node = parent
        assert isinstance(node, ast.stmt)
        return node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that contains a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        parent = self.parents[statement]
        blocks: list[list[ast.stmt]] = [getattr(parent, name, []) for name in BLOCKS]
        return next(block for block in blocks if statement in block)

    def same_line(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements of a block that are on the same line as this one: `a = 1; b = 2`."""
        cell, block = self.cell_of(statement), self.block(statement)
        first = last = block.index(statement)
        while first and cell.share_line(block[first - 1], block[first]):
            first -= 1
        while last + 1 < len(block) and cell.share_line(block[last], block[last + 1]):
            last += 1
        return block[first : last + 1]

    def is_alone(self, statement: ast.stmt) -> bool:
        """Whether a statement shares its lines with no other."""
        return self.same_line(statement) == [statement] and self._begins_line(statement)

    def _begins_line(self, statement: ast.stmt) -> bool:
        return self.cell_of(statement).begins_line(self.same_line(statement)[0])

    def line(self, node: ast.AST) -> int:
        """The first line (from 0) of the statement that contains a node, with its decorators.

        For a compound statement this is the line of the node's own clause.
        """
        statement = self.statement(node)
        while not self._begins_line(statement):  # `if x: a = 1`
            parent = self.parents[statement]
            if isinstance(parent, ast.Module):
                break
            statement = self.statement(parent)
        first = self.same_line(statement)[0]
        return min(map(line_of, (first, *getattr(first, "decorator_list", ()))))

    # Full names

    def use(self, node: ast.AST) -> RemovedApiUse | None:
        """Return the use of a removed API by a name or dotted name; None if it is not one."""
        names = self.full_names(node)
        known = {name for name in names if name.partition(".")[0] in ROOTS}
        rows = {row for name in known if (row := removed_apis.lookup_name(name)) is not None}
        if not rows or not isinstance(node, ast.expr):
            return None
        certain = "" not in names and len({row.new for row in rows}) == 1
        row = max(rows, key=lambda row: row.old)
        sources = [one.full for one in self.bindings(node) if one.full]
        source = next((s for s in sources if f"{row.old}.".startswith(f"{s}.")), row.old)
        return RemovedApiUse(self.cell_of(node), node, row, source, certain)

    def full_names(self, node: ast.AST) -> set[str]:
        """The possible full names of a name or dotted name; "" for the notebook's own names."""
        _, dot, rest = dotted(node).partition(".")
        return {(one.full and f"{one.full}{dot}{rest}") or "" for one in self.bindings(node)}

    def current_names(self, node: ast.AST) -> set[str]:
        """The possible full names, with those of removed APIs followed to the current ones."""
        names = self.full_names(node)
        rows = [removed_apis.lookup_name(name) for name in names]
        return names | {row.new for row in rows if row is not None and row.new}

    def defined_here(self, node: ast.AST) -> bool:
        """Whether a value comes from the notebook itself and not from an imported module."""
        bindings = self.bindings(node)
        return not bindings or any(binding.full is None for binding in bindings)


class Argument(NamedTuple):
    node: ast.expr | ast.keyword
    name: str
    """"" for a positional argument, `*args` and `**kwargs`."""
    value: ast.expr
    star: bool


def arguments(call: ast.Call) -> list[Argument]:
    """The arguments of a call, in the order of the text."""
    given = [Argument(node, "", node, isinstance(node, ast.Starred)) for node in call.args]
    for word in call.keywords:
        given.append(Argument(word, word.arg or "", word.value, word.arg is None))
    return sorted(given, key=lambda argument: (argument.node.lineno, argument.node.col_offset))
