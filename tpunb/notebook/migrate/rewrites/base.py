"""The base class of rewriters of one removed class."""

from __future__ import annotations

import libcst as cst

from tpunb.notebook.migrate.imports import NotebookImports
from tpunb.notebook.migrate.names import NotebookNames
from tpunb.notebook.migrate.statements import Removals


class Rewriter:
    """Rewrites the visible uses of one removed class; `CallRewriter` marks the others."""

    def __init__(self, names: NotebookNames, imports: NotebookImports, removals: Removals) -> None:
        self.names = names
        self.imports = imports
        self.removals = removals
        self._handled: set[cst.CSTNode] = set()

    def handled(self, node: cst.CSTNode) -> bool:
        """Whether this mention of the class was rewritten."""
        return node in self._handled
