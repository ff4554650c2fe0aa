"""Rewrites imports of removed modules, and adds imports that the rewritten code needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import BaseAssignment, ImportAssignment, Scope

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.migrate.names import (
    ROOTS,
    NotebookNames,
    dotted,
    imported_name,
    references,
    root_of,
)
from tpunb.notebook.migrate.statements import Removals

ALIASES = {
    "torch_xla.runtime": "xr",
    "torch_xla.core.xla_model": "xm",
    "torch_xla.distributed.parallel_loader": "pl",
    "torch_xla.distributed.data_parallel": "dp",
}
"""The aliases that torch_xla's own examples use for its modules."""


@dataclass
class ImportSite:
    """A statement that imports something from torch_xla."""

    cell: CodeCell
    line: cst.SimpleStatementLine
    scope: Scope
    sure: bool
    """True if it is not inside an `if` or `try`."""
    bindings: dict[str, str] = field(default_factory=dict)
    """Local names, keyed by the current name of the module."""


class NotebookImports:
    """The imports of torch_xla in a notebook."""

    def __init__(self, names: NotebookNames, removals: Removals) -> None:
        self.names = names
        self.removals = removals
        self.sites: list[ImportSite] = []
        self._released: set[cst.CSTNode] = set()
        self._gone: list[tuple[CodeCell, cst.Import | cst.ImportFrom, str]] = []
        """Imports of which nothing exists any more, each with the advice."""
        for cell, node in names.walk():
            if isinstance(node, (cst.Import, cst.ImportFrom)) and _roots(node) & set(ROOTS):
                self._rewrite(cell, node)

    def _rewrite(self, cell: CodeCell, node: cst.Import | cst.ImportFrom) -> None:
        line = self.names.parents[node]
        bindings: dict[str, str] = {}
        if isinstance(node, cst.Import):
            gone = self._import(cell, node, bindings)
        else:
            gone = self._import_from(cell, node, bindings)
        if gone:
            if len(gone) == len(node.names):  # type: ignore[arg-type]
                self._gone.append((cell, node, gone[0]))
                return
            cell.mark(self.names.line(node), gone[0], before=node)
        scope = self.names.scopes.get(node)
        if isinstance(line, cst.SimpleStatementLine) and scope is not None:
            block = self.names.parents[line]
            sure = isinstance(block, cst.Module) or isinstance(
                self.names.parents[block], cst.FunctionDef
            )
            self.sites.append(ImportSite(cell, line, scope, sure, bindings))

    def _import(self, cell: CodeCell, node: cst.Import, bindings: dict[str, str]) -> list[str]:
        gone = []
        for alias in node.names:
            name = dotted(alias.name)
            row = removed_apis.lookup_name(name) if name.partition(".")[0] in ROOTS else None
            if row is not None and row.new is None:
                gone.append(row.advice)
                continue
            current = name
            if row is not None and row.new is not None:
                current = row.new
                cell.replace_node(alias.name, current)
                cell.note(cell.line_of(node), f"{name} → {current}")
            if alias.asname:
                bindings[current] = dotted(alias.asname.name)
            else:
                bindings["torch_xla"] = "torch_xla"
                bindings[current] = current
        return gone

    def _import_from(
        self, cell: CodeCell, node: cst.ImportFrom, bindings: dict[str, str]
    ) -> list[str]:
        module = dotted(node.module)
        if isinstance(node.names, cst.ImportStar):
            row = removed_apis.lookup_name(module)
            if row is not None and row.new is not None and node.module is not None:
                cell.replace_node(node.module, row.new)
                cell.note(cell.line_of(node), f"{module} → {row.new}")
            return [row.advice] if row is not None and row.new is None else []
        gone = []
        parents: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            leaf = dotted(alias.name)
            local = dotted(alias.asname.name) if alias.asname else leaf
            row = removed_apis.lookup_name(f"{module}.{leaf}")
            full = f"{module}.{leaf}"
            if row is not None and row.old.endswith((".ParallelLoader", ".DataParallel")):
                parent = removed_apis.lookup_name(module)
                full = f"{parent.new if parent and parent.new else module}.{leaf}"
            elif row is not None and row.new is None:
                gone.append(row.advice)
            elif row is not None and row.new is not None:
                full = row.new
            changed |= full != f"{module}.{leaf}"
            bindings[full] = local
            parent_name, _, new_leaf = full.rpartition(".")
            suffix = "" if new_leaf == local else f" as {local}"
            parents.setdefault(parent_name, []).append(f"{new_leaf}{suffix}")
        if changed and len(gone) < len(node.names):
            line = cell.line_of(node)
            lines = [f"from {name} import {', '.join(what)}" for name, what in parents.items()]
            statement = self.names.parents[node]
            alone = isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1
            text = (f"\n{cell.indent(line)}" if alone else "; ").join(lines)
            cell.replace_node(node, text)
            cell.note(line, "; ".join(lines), before=cell.code(node))
        return gone

    def remove_gone(self) -> None:
        """Comment out imports of which nothing exists any more; mark those whose names are used.

        Without such an import the notebook would fail later, when the name is used.
        """
        for cell, node, advice in self._gone:
            scope = self.names.scopes.get(node)
            names = [] if isinstance(node.names, cst.ImportStar) else list(map(_local, node.names))
            uses = [use for name in names for use in references(scope, name)] if scope else []
            if all(use in self._released or use in self.removals for use in uses):
                self.removals.remove(node, advice)
            elif node not in self.removals:
                cell.mark(self.names.line(node), advice, before=node)

    def spelled(self, full: str, cell: CodeCell, node: cst.CSTNode) -> str:
        """Return the spelling of a current name at a node; add the import that it needs."""
        module, _, leaf = full.rpartition(".")
        return f"{self.module(module, cell, node)}.{leaf}"

    def module(self, module: str, cell: CodeCell, node: cst.CSTNode) -> str:
        """Return the spelling of a module at a node that uses torch_xla; add a missing import."""
        scope = self._scope(node)
        if scope is not None and module in (_import_of(assignment) for assignment in scope[module]):
            return module  # `import torch`: of a package without a dot, its own name
        sites = [
            site for site in self.sites if site.scope is scope and site.line not in self.removals
        ]
        anchor = next((site for site in sites if site.sure), sites[0] if sites else None)
        for site in sites:
            if (
                module in site.bindings
                and (site.sure or site is anchor)
                and (site.cell.index <= cell.index)
            ):
                return site.bindings[module]
        name = ALIASES.get(module, module)
        if name != module and self.is_taken(name, module):
            name = module
        if anchor is not None:
            text = f"import {module}" if name == module else f"import {module} as {name}"
            line = self._last_line(anchor)
            indent = anchor.cell.indent(anchor.cell.line_of(anchor.line.body[0]))
            anchor.cell.insert_below(line, text, indent)
            anchor.cell.note(line, f"added: {text}")
            anchor.bindings[module] = name
        return name

    def has(self, module: str, name: str, cell: CodeCell, line: int) -> bool:
        """Whether a module certainly has a global name before a line (from 0) of a cell."""
        return any(
            site.sure
            and site.bindings.get(module) == name
            and (site.cell.index, self._last_line(site)) < (cell.index, line)
            for site in self.sites
            if site.line not in self.removals
        )

    def _last_line(self, site: ImportSite) -> int:
        return site.cell.positions[site.line.body[-1]].end.line - 1

    def _scope(self, node: cst.CSTNode) -> Scope | None:
        """The scope of the import through which a node reaches torch_xla."""
        scope = self.names.scopes.get(node)
        root = root_of(node)
        if scope is None or root is None:
            return scope
        for assignment in scope[root]:
            if isinstance(assignment, ImportAssignment):
                return assignment.scope
        return scope.globals

    def is_taken(self, name: str, module: str) -> bool:
        """Whether the notebook uses a name for something other than this module."""
        every = {known for known in self.names.scopes.values() if known is not None}
        return any(
            assignment.name == name and _import_of(assignment) != module
            for scope in every
            for assignment in scope.assignments
        )

    def release(self, node: cst.CSTNode) -> None:
        """Record that a dotted name no longer uses its import."""
        while isinstance(node, cst.Attribute):
            node = node.value
        self._released.add(node)

    def drop_unused(self, unread: str) -> None:
        """Remove imports that are unused after the rewriting.

        `unread` is the text of cells that could not be parsed: imports of names in it stay.
        """
        for site in self.sites:
            (node, *others) = site.line.body
            if others or not isinstance(node, cst.Import) or len(node.names) != 1:
                continue
            asname = node.names[0].asname
            if asname is None or not site.sure or site.line.trailing_whitespace.comment:
                continue
            name = dotted(asname.name)
            used = set(references(site.scope, name))
            mentioned = re.search(rf"\b{re.escape(name)}\b", unread) is not None
            if used and used <= self._released and not mentioned:
                line = site.cell.line_of(node)
                site.cell.delete_line(line)
                site.cell.note(line, "removed: it is no longer used")


def _import_of(assignment: BaseAssignment) -> str | None:
    return imported_name(assignment) if isinstance(assignment, ImportAssignment) else None


def _local(alias: cst.ImportAlias) -> str:
    name = dotted(alias.name)
    return dotted(alias.asname.name) if alias.asname else name.partition(".")[0]


def _roots(node: cst.Import | cst.ImportFrom) -> set[str]:
    if isinstance(node, cst.ImportFrom):
        return set() if node.relative else {dotted(node.module).partition(".")[0]}
    return {dotted(alias.name).partition(".")[0] for alias in node.names}
