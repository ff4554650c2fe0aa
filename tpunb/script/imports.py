"""The full names of what a notebook imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable


class Imports:
    """Names that are imported anywhere in some cells."""

    def __init__(self, trees: Iterable[ast.AST]) -> None:
        self._full: dict[str, str] = {}
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self._full[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._full[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def dotted(self, node: ast.expr) -> str:
        """The full name of an expression: 'torch_xla.core.xla_model.xla_device' for
        `xm.xla_device`; '' for what is not a name.
        """
        if isinstance(node, ast.Name):
            return self._full.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            left = self.dotted(node.value)
            return f"{left}.{node.attr}" if left else ""
        return ""
