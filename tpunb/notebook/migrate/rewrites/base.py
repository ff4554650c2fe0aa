"""The base class of rewriters for a removed class."""

from __future__ import annotations

import libcst as cst

from tpunb.notebook.migrate.imports import NotebookImports
from tpunb.notebook.migrate.names import NotebookNames
from tpunb.notebook.migrate.statements import Removals


class Rewriter:
    """Rewrites the uses of a removed class that it fully understands; `CallRewriter` marks the
    others.
    """

    def __init__(self, names: NotebookNames, imports: NotebookImports, removals: Removals) -> None:
        self.names = names
        self.imports = imports
        self.removals = removals
        self._handled: set[cst.CSTNode] = set()

    def handled(self, node: cst.CSTNode) -> bool:
        """Whether this use of the class was rewritten."""
        return node in self._handled
