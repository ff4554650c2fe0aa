"""Edits of one program, and what the code that they write needs."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpunb.notebook.migrate.cell import CodeCell, last_line_of, line_of
from tpunb.notebook.migrate.names import NotebookNames, arguments
from tpunb.notebook.migrate.statements import Removals
from tpunb.notebook.migrate.torchtpu.helpers import HELPERS, MODULES_OF, NEEDS
from tpunb.notebook.migrate.torchtpu.where import RankCode, Where
from tpunb.notebook.scopes import XM

DIST = "torch.distributed"
MODULES = {
    **{"torch": "torch", "dist": DIST},
    **{name: name for name in ("contextlib", "os", "time")},
}
"""Modules that the written code uses, by the name that it gives them."""
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP"


@dataclass
class Edits:
    """Rewrites the names of one program: one or more cells."""

    names: NotebookNames
    code: RankCode
    done: set[ast.AST] = field(default_factory=set)
    """Nodes that are rewritten already, or that a rewrite removes."""
    modules: set[str] = field(default_factory=set)
    helpers: dict[str, str] = field(default_factory=dict)
    """The helpers that the notebook gets, with their names there."""
    ddp: bool = False
    launches: list[tuple[int, int]] = field(default_factory=list)
    """The lines (from 0) where a function was launched, each with its cell."""
    first: int | None = None
    """The first cell whose new code needs an import or a helper."""
    _dropped: dict[ast.stmt, str] = field(default_factory=dict)

    # Spelling

    def where(self, node: ast.AST) -> Where:
        cell = self.names.cell_of(node)
        return self.code.where(self.names.scope(node), cell.index)

    def module(self, name: str) -> str:
        """Return how code calls torch.distributed (`dist`), torch or os, which it then imports."""
        self.modules.add(name)
        return name if not self.is_taken(name) else MODULES[name]

    def is_taken(self, name: str) -> bool:
        """Whether the program has a name for something else than this module."""
        return any(
            binding.full != MODULES.get(name)
            for scope in self.names.scopes.every
            for binding in scope.bindings.get(name, ())
        )

    def helper(self, name: str) -> str:
        """Return the name of a helper, which the notebook then gets."""
        for one in {name, NEEDS.get(name, name)}:
            self._need(one)
        for module in MODULES_OF.get(name, ("dist",)):
            self.module(module)
        return self.helpers.get(name, name)

    def _need(self, name: str) -> None:
        """Add a helper, under another name if the notebook has something else with that name."""
        bindings = (
            one for scope in self.names.scopes.every for one in scope.bindings.get(name, ())
        )
        nodes = [binding.node for binding in bindings]
        own = ast.dump(ast.parse(HELPERS[name]).body[0])
        if not nodes or any(ast.dump(node) != own for node in nodes):
            self.helpers[name] = f"{name}_" if nodes else name

    # Changing

    def fill(
        self, node: ast.expr, template: str, slots: Sequence[ast.expr] = (), why: str = ""
    ) -> bool:
        """Replace an expression by a template with the texts of parts of it: `{0}`, `{1}`, …

        The parts keep their own rewrites. False, without a change, if they are not in the order of
        the text.
        """
        cell = self.names.cell_of(node)
        self._note_first(cell.index)
        pieces = [template]
        for index in range(len(slots)):
            pieces[-1:] = pieces[-1].split(f"{{{index}}}", 1)
        spans = [cell.span(slot) for slot in slots]
        start, end = cell.bare_span(node)
        ends = [start, *(end for _, end in spans)]
        if any(first < before for before, (first, _) in zip(ends, spans, strict=False)):
            return False
        kept = {part for slot in slots for part in ast.walk(slot)}
        self.done |= set(ast.walk(node)) - kept
        for before, piece, first in zip(ends, pieces, [*(s for s, _ in spans), end], strict=True):
            cell.replace(before, first, piece)
        parts = zip(pieces, ["", *map(cell.code, slots)], strict=True)
        written = "".join(f"{code}{piece}" for piece, code in parts)
        written = "; ".join(line.strip() for line in written.split("\n"))
        cell.note(line_of(node), why or f"{cell.code(node)} → {written}")
        return True

    def _note_first(self, index: int) -> None:
        if self.modules or self.helpers:
            self.first = index if self.first is None else min(index, self.first)

    def drop(self, node: ast.AST, why: str) -> bool:
        """Remove the statement that consists of an expression; False if it is a part of one."""
        statement = self.names.statement(node)
        if not isinstance(statement, ast.Expr) or statement.value is not node:
            return False
        self._dropped[statement] = why
        self.done |= set(ast.walk(statement))
        return True

    def drop_all(self, removals: Removals) -> None:
        """Make the edits of `drop`: whole lines go, an empty block gets `pass`.

        `removals`: statements that become comments.
        """
        for statement, why in self._dropped.items():
            cell = self.names.cell_of(statement)
            block = self.names.block(statement)
            first = next(other for other in block if other in self._dropped)
            empty = not isinstance(self.names.parents[statement], ast.Module) and all(
                other in self._dropped or other in removals for other in block
            )
            cell.note(line_of(statement), why)
            if not self.names.is_alone(statement) or (empty and statement is first):
                cell.replace(*cell.bare_span(statement), "pass")
                continue
            for line in range(self.names.line(statement), last_line_of(statement) + 1):
                cell.delete_line(line)

    def on_rank_0(self, node: ast.AST) -> str | None:
        """Put `if dist.get_rank() == 0:` around the statement of an expression.

        Return what the expression must end with instead if it is no statement of its own; None if
        it can be neither.
        """
        statement, cell = self.names.statement(node), self.names.cell_of(node)
        if self._is_below_master(statement):
            return ""
        if isinstance(statement, ast.Expr) and statement.value is node:
            if self.names.is_alone(statement):
                line = line_of(statement)
                # Above marks, which a second migration finds above the statement itself.
                cell.insert_below(line - 1, f"if {self.is_rank_0(node)}:", cell.indent(line))
                cell.insert(cell.bare_span(statement)[0], "    ")
                return ""
            return f" if {self.is_rank_0(node)} else None"
        if isinstance(self.names.parents[node], ast.Lambda):
            return f" if {self.is_rank_0(node)} else None"
        return None

    def _is_below_master(self, statement: ast.stmt) -> bool:
        """Whether a statement is in `if xm.is_master_ordinal():`."""
        node: ast.AST = statement
        while not isinstance(around := self.names.parents[node], ast.Module):
            if isinstance(around, ast.If) and node in around.body:
                called = getattr(around.test, "func", around.test)
                if f"{XM}.is_master_ordinal" in self.names.full_names(called):
                    return True
            node = around
        return False

    def is_rank_0(self, node: ast.AST) -> str:
        return f"{self.rank(node)} == 0"

    def rank(self, node: ast.AST) -> str:
        where = self.where(node)
        if where == "ranks":
            return f"{self.module('dist')}.get_rank()"
        return "0" if where == "single" else self._variable("RANK", 0)

    def world(self, node: ast.AST) -> str:
        where = self.where(node)
        if where == "ranks":
            return f"{self.module('dist')}.get_world_size()"
        return "1" if where == "single" else self._variable("WORLD_SIZE", 1)

    def local_rank(self, node: ast.AST) -> str:
        if self.where(node) == "single":
            return "0"
        return self._variable("LOCAL_RANK", 0)

    def _variable(self, name: str, default: int) -> str:
        return f'int({self.module("os")}.environ.get("{name}", {default}))'

    def given(self, call: ast.Call, *order: str) -> dict[str, ast.expr] | None:
        """Return the arguments of a call by name; None if `*` or `**` hides them."""
        found: dict[str, ast.expr] = {}
        for at, one in enumerate(arguments(call)):
            if one.star or (not one.name and at >= len(order)):
                return None
            found[one.name or order[at]] = one.value
        return found

    def mark(self, node: ast.expr, advice: str) -> None:
        cell: CodeCell = self.names.cell_of(node)
        cell.mark(
            self.names.line(node), f"{cell.code(node)} of torch_xla is left. {advice}", before=node
        )
