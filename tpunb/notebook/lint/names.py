"""Resolves expressions and names to full dotted names, through the imports of all cells."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from tpunb.notebook.lint.walk import Frame, Site, Sites


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


def argument(node: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the argument of a call with a name, or at a position (from 0); None if absent."""
    for word in node.keywords:
        if word.arg == name:
            return word.value
    if position is not None and len(node.args) > position:
        before = node.args[: position + 1]
        if not any(isinstance(part, ast.Starred) for part in before):
            return node.args[position]
    return None


def literal(node: ast.AST | None) -> object:
    """Return the value of a constant; Ellipsis for any other node."""
    return node.value if isinstance(node, ast.Constant) else ...


def last_part(node: ast.expr) -> str:
    """Return the last part of a name: 'step' for `self.optimizer.step`; '' for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """Return a name as it is written, 'self.optimizer'; '' for other nodes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


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


BUILTINS = frozenset(dir(builtins))


class NameTable:
    """The imports and assignments of a notebook."""

    def __init__(self, sites: Sites) -> None:
        self.imported: dict[str, list[str]] = {}
        """Local name → the full names that imports bind to it."""
        self.star = False
        """Whether a `from x import *` may bind any name."""
        self.star_modules: set[str] = set()
        """The modules of these imports; '' for a relative import."""
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
                        self.star_modules.add("" if node.level else node.module or "")
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
        """Return the full dotted name of an expression: 'torch_xla.core.xla_model.mark_step' for
        `xm.mark_step`. The full name of a builtin is its name; '' for anything not imported.
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
        """Whether the root name of an expression can only refer to what it was imported as."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name) or self.star:
            return False
        name = node.id
        once = len(set(self.imported.get(name, ()))) == 1
        if name in BUILTINS and name not in self.imported:
            once = True
        return once and name not in self._stored and name not in self._defined

    def assigned(self, name: str) -> bool:
        """Whether a name is assigned anywhere, except by an import or `def`."""
        return name in self._stored

    def binds(self, name: str) -> bool:
        """Whether the notebook itself may bind a name anywhere, without `import *`."""
        return name in self.imported or name in self._stored or name in self._defined

    def bound(self, name: str) -> bool:
        """Whether the notebook may bind a name anywhere, or it is a builtin."""
        return self.binds(name) or name in BUILTINS or self.star
