"""Resolution of a notebook's names by LibCST, with all cells as one module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import libcst as cst
from libcst.metadata import (
    Assignment,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.removed_apis import RemovedApi

ROOTS = ("torch_xla", "torch_xla_py")


@dataclass(frozen=True)
class RemovedApiUse:
    """A use of a removed name in code, except in an import."""

    cell: CodeCell
    node: cst.Name | cst.Attribute
    row: RemovedApi
    imported: str
    """The imported dotted name through which it is reached."""
    certain: bool
    """False if the name may also refer to something that the notebook defines."""

    @property
    def plain(self) -> bool:
        """True if it is reached by its full name, after `import a.b`, not by an alias."""
        return isinstance(self.node, cst.Attribute) and self.cell.code(self.node) == self.row.old


class NotebookNames:
    """Scopes and parents over all cells that are Python."""

    def __init__(self, cells: Sequence[CodeCell]) -> None:
        self.cells = [cell for cell in cells if cell.module is not None]
        self._cell_of: dict[cst.CSTNode, CodeCell] = {}
        body: list[Any] = []
        for cell in self.cells:
            assert cell.module is not None
            body += cell.module.body
            self._cell_of.update(dict.fromkeys(cell.module.body, cell))
        self.module = cst.Module(body=body)
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        self.scopes: Mapping[cst.CSTNode, Scope | None] = wrapper.resolve(ScopeProvider)
        self.parents = cast(
            "Mapping[cst.CSTNode, cst.CSTNode]", wrapper.resolve(ParentNodeProvider)
        )
        self._order = [
            (cell, node) for top, cell in self._cell_of.items() for node in nodes_of(top)
        ]

    def walk(self) -> list[tuple[CodeCell, cst.CSTNode]]:
        """Return every node with its cell, outer nodes first, in the order of the text."""
        return self._order

    def cell_of(self, node: cst.CSTNode) -> CodeCell:
        """The cell that contains a node."""
        while node not in self._cell_of:
            node = self.parents[node]
        return self._cell_of[node]

    def top(self, node: cst.CSTNode) -> cst.CSTNode:
        """The top-level statement that contains a node."""
        while node not in self._cell_of:
            node = self.parents[node]
        return node

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The innermost statement line or compound statement that contains a node."""
        while not isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            node = self.parents[node]
        return node

    def line(self, node: cst.CSTNode) -> int:
        """The first line (from 0) of the statement that contains a node.

        For a compound statement this is the line of the node's own clause.
        """
        cell = self.cell_of(node)
        statement = self.statement(node)
        if isinstance(statement, cst.SimpleStatementLine):
            return cell.line_of(statement.body[0])
        start = cell.line_of(statement)
        # LibCST's position of a decorated function is its `def`; the decorators are above it.
        lines = [
            start,
            *(cell.line_of(decorator) for decorator in getattr(statement, "decorators", ())),
        ]
        return min(lines)

    def use(self, cell: CodeCell, node: cst.CSTNode) -> RemovedApiUse | None:
        """Return the use of a removed API by a name or dotted name; None if it is not one."""
        root = root_of(node)
        scope = self.scopes.get(node)
        if root is None or scope is None:
            return None
        names = scope.get_qualified_names_for(cast("cst.Name | cst.Attribute", node))
        imported = {
            qualified.name for qualified in names if qualified.source is QualifiedNameSource.IMPORT
        }
        rows = {
            row
            for name in imported
            if name.partition(".")[0] in ROOTS
            and (row := removed_apis.lookup_name(name)) is not None
        }
        if not rows:
            return None
        certain = len(imported) == len(names) and len({row.new for row in rows}) == 1
        row = sorted(rows, key=lambda row: row.old)[-1]
        return RemovedApiUse(
            cell,
            cast("cst.Name | cst.Attribute", node),
            row,
            self._source(scope, root, row),
            certain,
        )

    def _source(self, scope: Scope, root: str, row: RemovedApi) -> str:
        for assignment in scope[root]:
            if isinstance(assignment, ImportAssignment):
                name = imported_name(assignment)
                if name and (row.old == name or row.old.startswith(f"{name}.")):
                    return name
        return row.old

    def full_names(self, call: cst.Call) -> Iterator[str]:
        """Yield the possible full names of the called function."""
        scope = self.scopes.get(call.func)
        if scope is not None and root_of(call.func) is not None:
            for qualified in scope.get_qualified_names_for(call.func):
                yield qualified.name

    def defined_here(self, node: cst.BaseExpression) -> bool:
        """Whether a value comes from the notebook itself and not from an imported module."""
        root = root_of(node)
        scope = self.scopes.get(node)
        if root is None or scope is None:
            return True
        assignments = scope[root]
        return not assignments or any(
            not isinstance(assignment, ImportAssignment) for assignment in assignments
        )


def root_of(node: cst.CSTNode) -> str | None:
    """`a` of `a.b.c`; None for anything but dotted names."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else None


def dotted(node: cst.CSTNode | None) -> str:
    """The text of a dotted name; '' for other nodes."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def imported_name(assignment: ImportAssignment) -> str:
    """The dotted name to which an import binds a local name; "" for a relative import."""
    node = assignment.node
    if isinstance(node, cst.Import):
        for alias in node.names:
            name = dotted(alias.name)
            local = dotted(alias.asname.name) if alias.asname else name.partition(".")[0]
            if local == assignment.name.partition(".")[0]:
                return name if alias.asname else local
        return ""
    if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
        for alias in node.names:
            name = dotted(alias.name)
            if (dotted(alias.asname.name) if alias.asname else name) == assignment.name:
                return f"{dotted(node.module)}.{name}"
    return ""


def references(scope: Scope, name: str) -> Iterator[cst.CSTNode]:
    """Yield every node that reads a name of a scope."""
    for assignment in scope[name]:
        if isinstance(assignment, Assignment):
            yield from (access.node for access in assignment.references)


def nodes_of(top: cst.CSTNode) -> list[cst.CSTNode]:
    """Return a node and all nodes in it except white space, outer nodes first."""
    nodes = []
    waiting = [top]
    while waiting:
        node = waiting.pop()
        # White space has no names, and is the most frequent kind of node.
        if not isinstance(node, cst.BaseParenthesizableWhitespace):
            nodes.append(node)
            waiting += reversed(node.children)
    return nodes
