"""What names mean: full dotted names through imports, over all cells of a notebook."""

from __future__ import annotations

import ast
import builtins

from tpunb.lint.expressions import dotted
from tpunb.lint.walk import Frame, Sites

BUILTINS = frozenset(dir(builtins))


class Names:
    """The imports and assignments of a notebook."""

    def __init__(self, sites: Sites) -> None:
        self.imported: dict[str, list[str]] = {}
        """Name → the full names that it is imported as."""
        self.star = False
        """Whether a `from x import *` may bind any name."""
        for site in sites.imports:
            node = site.node
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self._bind(alias.asname or top, alias.name if alias.asname else top)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*":
                        self.star = True
                    elif node.level or not node.module:
                        self._bind(alias.asname or alias.name, "")
                    else:
                        self._bind(alias.asname or alias.name, f"{node.module}.{alias.name}")
        self._defined = {f.name for f in sites.functions if f.method_of is None}
        self._defined |= {c.node.name for c in sites.classes if isinstance(c.node, ast.ClassDef)}
        self._stored = sites.stored

    def _bind(self, name: str, full: str) -> None:
        self.imported.setdefault(name, []).append(full)

    def full(self, node: ast.AST, frame: Frame) -> str:
        """The full dotted name of an expression: 'torch_xla.core.xla_model.mark_step' for
        `xm.mark_step`. A builtin is its own name; '' for everything that was not imported.
        """
        name, _, rest = dotted(node).partition(".")
        if not name:
            return ""
        function = frame.function
        while function is not None:
            if name in function.locals:
                return ""
            function = function.outer.function
        known = self.imported.get(name)
        if known:
            root = known[-1]
        elif name in BUILTINS and name not in self._stored and name not in self._defined:
            root = name
        else:
            return ""
        return f"{root}.{rest}" if root and rest else root

    def sure(self, node: ast.expr) -> bool:
        """Whether the name at the root of an expression can only be what it was imported as."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name) or self.star:
            return False
        name = node.id
        once = len(set(self.imported.get(name, ()))) == 1
        return once and name not in self._stored and name not in self._defined

    def assigned(self, name: str) -> bool:
        """Whether a name is assigned anywhere, other than by an import or `def`."""
        return name in self._stored

    def bound(self, name: str) -> bool:
        """Whether the notebook binds a name anywhere at all."""
        return (
            name in self.imported
            or name in self._stored
            or name in self._defined
            or name in BUILTINS
            or self.star
        )
