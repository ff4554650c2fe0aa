"""Where code of a notebook runs: on the ranks, which have a process group, or in the kernel."""

from __future__ import annotations

import ast
from typing import Literal

from tpunb.notebook.files import cell_magics
from tpunb.notebook.migrate.names import NotebookNames
from tpunb.notebook.scopes import DefinedFunction, Function, Scope, last_part

Where = Literal["single", "kernel", "ranks", "both"]
"""`single`: the notebook starts no ranks. `kernel`: code of the kernel's own cells, which ranks
also run if their prelude is replicated. `both`: a function that the kernel and the ranks call."""


class RankCode:
    """The cells and functions that ranks run."""

    def __init__(self, names: NotebookNames, *, script: bool = False) -> None:
        """`script`: the cells are a program of their own, which every rank runs."""
        self.trains = {
            index for index, cell in names.cells.items() if "tpu_train" in cell_magics(cell.text)
        }
        self._scopes = names.scopes
        self._script = script
        self.starts = script or bool(self.trains)
        self.has_group = self._makes_group()
        """Whether the ranks certainly make a process group themselves."""
        self._in_ranks = self._reached(ranks=True)
        self._in_kernel = self._reached(ranks=False)

    def where(self, scope: Scope | None, cell: int) -> Where:
        """Return where code in a scope of a cell runs."""
        if not self.starts:
            return "single"
        nodes: list[ast.AST] = []
        while scope is not None:
            if isinstance(scope.node, Function | ast.Lambda):
                nodes.append(scope.node)
            scope = scope.outer
        if not nodes:
            return "ranks" if self._script or cell in self.trains else "kernel"
        kernel = any(node in self._in_kernel for node in nodes)
        ranks = any(node in self._in_ranks for node in nodes)
        if kernel:
            return "both" if ranks else "kernel"
        return "ranks"

    def _makes_group(self) -> bool:
        return any(
            isinstance(site.node, ast.Call) and last_part(site.node.func) == "init_process_group"
            for cell in self._scopes.cells
            if self._script or cell.index in self.trains
            for site in self._scopes.executed(cell, certain=True, launches=True)
        )

    def _reached(self, *, ranks: bool) -> set[ast.AST]:
        functions: set[DefinedFunction | None] = set()
        for cell in self._scopes.cells:
            if (self._script or cell.index in self.trains) == ranks:
                sites = self._scopes.executed(cell, launches=ranks)
                functions |= {site.frame.function for site in sites}
        return {function.node for function in functions if function is not None}
