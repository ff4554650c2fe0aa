"""Rewrites imports of removed modules, and adds imports that the rewritten code needs."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell, last_line_of, line_of
from tpunb.notebook.migrate.names import ROOTS, NotebookNames
from tpunb.notebook.migrate.statements import Removals
from tpunb.notebook.scopes import Function, Scope, imported, packages

Import = ast.Import | ast.ImportFrom

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
    node: Import
    scope: Scope | None
    sure: bool
    """True if it is not inside an `if` or `try`."""
    last: int
    """The last line of the statement, from 0."""
    bindings: dict[str, str] = field(default_factory=dict)
    """Local names, keyed by the current name of the module."""


class NotebookImports:
    def __init__(self, names: NotebookNames, removals: Removals) -> None:
        self.names = names
        self.removals = removals
        self.sites: list[ImportSite] = []
        self._released: set[ast.AST] = set()
        self._gone: list[tuple[CodeCell, Import, str]] = []
        """Imports that no longer exist, each with the advice."""
        for cell, node in names.walk():
            if isinstance(node, Import) and packages(node) & set(ROOTS):
                self._rewrite(cell, node)

    def _rewrite(self, cell: CodeCell, node: Import) -> None:
        bindings: dict[str, str] = {}
        if isinstance(node, ast.Import):
            gone = self._import(cell, node, bindings)
        else:
            gone = self._import_from(cell, node, bindings)
        if len(gone) == len(node.names):
            self._gone.append((cell, node, gone[0]))
            return
        if gone:
            cell.mark(self.names.line(node), gone[0], before=node)
        line = self.names.same_line(node)
        if cell.begins_line(line[0]):
            sure = isinstance(self.names.parents[node], ast.Module | Function)
            last = last_line_of(line[-1])
            self.sites.append(ImportSite(cell, node, self.names.scope(node), sure, last, bindings))

    def _import(self, cell: CodeCell, node: ast.Import, bindings: dict[str, str]) -> list[str]:
        gone = []
        for alias in node.names:
            current = alias.name
            row = removed_apis.lookup_name(current) if _root(current) in ROOTS else None
            if row is not None and row.new is None:
                gone.append(row.advice)
                continue
            if row is not None and row.new is not None:
                current = row.new
                cell.replace_node(alias, _import_as(current, alias.asname or current))
                cell.note(line_of(node), f"{alias.name} → {current}")
            if alias.asname:
                bindings[current] = alias.asname
            else:
                bindings["torch_xla"] = "torch_xla"
                bindings[current] = current
        return gone

    def _import_from(
        self, cell: CodeCell, node: ast.ImportFrom, bindings: dict[str, str]
    ) -> list[str]:
        module = node.module or ""
        parent = removed_apis.lookup_name(module)
        if node.names[0].name == "*":
            if parent is not None and parent.new is not None:
                cell.replace_node(node, f"from {parent.new} import *")
                cell.note(line_of(node), f"{module} → {parent.new}")
            return [parent.advice] if parent is not None and parent.new is None else []
        gone = []
        sources: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            local = alias.asname or alias.name
            full = f"{module}.{alias.name}"
            row = removed_apis.lookup_name(full)
            if row is not None and row.old.endswith((".ParallelLoader", ".DataParallel")):
                full = f"{parent.new if parent and parent.new else module}.{alias.name}"
            elif row is not None and row.new is None:
                gone.append(row.advice)
            elif row is not None and row.new is not None:
                full = row.new
            changed |= full != f"{module}.{alias.name}"
            bindings[full] = local
            source, _, leaf = full.rpartition(".")
            sources.setdefault(source, []).append(_import_as(leaf, local))
        if changed and len(gone) < len(node.names):
            line = line_of(node)
            lines = [f"from {name} import {', '.join(what)}" for name, what in sources.items()]
            separator = f"\n{cell.indent(line)}" if self.names.is_alone(node) else "; "
            cell.replace_node(node, separator.join(lines))
            cell.note(line, "; ".join(lines), before=cell.code(node))
        return gone

    def remove_gone(self) -> None:
        """Comment out imports that no longer exist; mark those whose names are used.

        Without such an import the notebook would fail later, when the name is used.
        """
        for cell, node, advice in self._gone:
            scope = self.names.scope(node)
            uses = [use for name, _ in imported(node) for use in self.names.references(name, scope)]
            if all(use in self._released or use in self.removals for use in uses):
                self.removals.add(node, advice)
            elif node not in self.removals:
                cell.mark(self.names.line(node), advice, before=node)

    def spelled(self, full: str, node: ast.expr) -> str:
        """Return the spelling of a current name at a node; add the import that it needs."""
        module, _, leaf = full.rpartition(".")
        return f"{self.module(module, node)}.{leaf}"

    def module(self, module: str, node: ast.expr) -> str:
        """Return the spelling of a module at a node that uses torch_xla; add a missing import."""
        scope = self._scope(node)
        if any(binding.full == module for binding in self.names.scopes.bindings(module, scope)):
            return module  # `import torch`: of a package without a dot, its own name
        sites = [
            site for site in self.sites if site.scope is scope and site.node not in self.removals
        ]
        anchor = next((site for site in sites if site.sure), sites[0] if sites else None)
        index = self.names.cell_of(node).index
        for site in sites:
            if (
                module in site.bindings
                and (site.sure or site is anchor)
                and site.cell.index <= index
            ):
                return site.bindings[module]
        name = ALIASES.get(module, module)
        if name != module and self.is_taken(name, module):
            name = module
        if anchor is not None:
            text = f"import {_import_as(module, name)}"
            indent = anchor.cell.indent(self.names.line(anchor.node))
            anchor.cell.insert_below(anchor.last, text, indent)
            anchor.cell.note(anchor.last, f"added: {text}")
            anchor.bindings[module] = name
        return name

    def has(self, module: str, name: str, cell: CodeCell, line: int) -> bool:
        """Whether a module certainly has a global name before a line (from 0) of a cell."""
        return any(
            site.sure
            and site.bindings.get(module) == name
            and (site.cell.index, site.last) < (cell.index, line)
            for site in self.sites
            if site.node not in self.removals
        )

    def _scope(self, node: ast.expr) -> Scope:
        """The scope of the import through which a node reaches torch_xla."""
        homes = (one.frame.scope for one in self.names.bindings(node) if one.full is not None)
        return next(homes, self.names.scopes.globals)

    def is_taken(self, name: str, module: str) -> bool:
        """Whether the notebook uses a name for something other than this module."""
        return any(
            binding.full != module
            for scope in set(self.names.scopes.scopes.values())
            for binding in scope.bindings.get(name, ())
        )

    def release(self, node: ast.expr) -> None:
        """Record that a dotted name no longer uses its import."""
        while isinstance(node, ast.Attribute):
            node = node.value
        self._released.add(node)

    def drop_unused(self, unread: str) -> None:
        """Remove imports that are unused after the rewriting.

        `unread` is the text of cells that could not be parsed: imports of names in it stay.
        """
        for site in self.sites:
            line = line_of(site.node)
            (alias, *others) = site.node.names
            alone = site.cell.lines[line].strip(" \t;") == site.cell.code(site.node)
            if isinstance(site.node, ast.ImportFrom) or others or not alone or not site.sure:
                continue
            name = alias.asname
            used = set(self.names.references(name, site.scope)) if name else set()
            mentioned = name is not None and re.search(rf"\b{re.escape(name)}\b", unread)
            if used and used <= self._released and not mentioned:
                site.cell.delete_line(line)
                site.cell.note(line, "removed: it is no longer used")


def _import_as(name: str, local: str) -> str:
    return name if name == local else f"{name} as {local}"


def _root(name: str) -> str:
    return name.partition(".")[0]
