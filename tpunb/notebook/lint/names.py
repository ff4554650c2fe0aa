"""Questions about expressions that several rules ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.scopes import (
    BUILTINS,
    Scopes,
    Site,
    imported,
)
from tpunb.notebook.scopes import (
    argument as argument,
)
from tpunb.notebook.scopes import (
    dotted as dotted,
)
from tpunb.notebook.scopes import (
    last_part as last_part,
)


def compared(test: ast.expr) -> Iterator[ast.AST]:
    """Yield the nodes of a condition, except comparisons whose result is the same on all ranks:
    with None ("is it set?") and with -1 ("one process only").
    """
    todo: list[ast.AST] = [test]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Compare) and any(
            (isinstance(part, ast.Constant) and part.value is None)
            or (isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub))
            for part in node.comparators
        ):
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def call(site: Site) -> ast.Call:
    """Return the node of a site that is a call."""
    assert isinstance(site.node, ast.Call)
    return site.node


def literal(node: ast.AST | None) -> object:
    """Return the value of a constant; Ellipsis for any other node."""
    return node.value if isinstance(node, ast.Constant) else ...


def words(node: ast.AST) -> set[str]:
    """All names, attributes and strings in an expression, in lower case."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id.lower())
        elif isinstance(part, ast.Attribute):
            names.add(part.attr.lower())
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            names.add(part.value.lower())
    return names


PLATFORM = ("cuda", "gpu", "tpu", "xla", "device", "cpu", "mps", "hardware", "accelerator")


def asks_hardware(node: ast.AST) -> bool:
    """Whether an expression names a kind of hardware: `torch.cuda.is_available()`, `USE_TPU`."""
    return any(mark in word for word in words(node) for mark in PLATFORM)


def for_other_hardware(site: Site) -> bool:
    """Whether a site is under a condition on the hardware."""
    return any(asks_hardware(test) for test, _ in site.conditions())


class NameTable:
    """The names that the cells of a notebook bind, in any scope."""

    def __init__(self, sites: Scopes) -> None:
        self._sites = sites
        self.star = bool(sites.stars)
        """Whether a `from x import *` may bind any name."""
        self.star_modules = {
            "" if node.level else node.module or ""
            for node in (site.node for site in sites.stars)
            if isinstance(node, ast.ImportFrom)
        }
        """The modules of these imports; '' for a relative import."""
        self.imported: dict[str, list[str]] = {}
        """Local name → the full names that imports bind to it."""
        for name, full in (pair for site in sites.imports for pair in imported(site.node)):
            self.imported.setdefault(name, []).append(full)

    def sure(self, node: ast.expr) -> bool:
        """Whether the root name of an expression can only refer to what it was imported as."""
        return self._sites.is_certain(node, self._sites.scopes.get(node, self._sites.globals))

    def assigned(self, name: str) -> bool:
        """Whether a name is assigned anywhere, except by an import or `def`."""
        scopes = self._sites.every
        bindings = (one for scope in scopes for one in scope.bindings.get(name, ()))
        return any(isinstance(one.node, ast.Name) for one in bindings)

    def binds(self, name: str) -> bool:
        """Whether the notebook itself may bind a name anywhere, without `import *`."""
        return any(
            name in scope.bindings and not isinstance(scope.node, ast.ClassDef)
            for scope in self._sites.every
        )

    def bound(self, name: str) -> bool:
        """Whether the notebook may bind a name anywhere, or it is a builtin."""
        return self.binds(name) or name in BUILTINS or self.star
