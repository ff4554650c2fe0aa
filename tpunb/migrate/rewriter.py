"""What rewriters of one construct share: what they read, and what they have dealt with."""

from __future__ import annotations

import libcst as cst

from tpunb.migrate.imports import Imports
from tpunb.migrate.names import Names
from tpunb.migrate.statements import Retirements


class Rewriter:
    """Rewrites the uses of one retired class that can be seen; the others are marked elsewhere."""

    def __init__(self, names: Names, imports: Imports, retirements: Retirements) -> None:
        self.names = names
        self.imports = imports
        self.retirements = retirements
        self._handled: set[cst.CSTNode] = set()

    def handled(self, node: cst.CSTNode) -> bool:
        """Whether this mention of the class was rewritten."""
        return node in self._handled
