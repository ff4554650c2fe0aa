"""Small questions about expressions, and about where they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.lint.walk import Site


def compared(test: ast.expr) -> Iterator[ast.AST]:
    """The nodes of a test, without comparisons that come out alike on all ranks: with None
    ("is it set?") and with -1 ("one process only").
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
    """The node of a site that is a call."""
    assert isinstance(site.node, ast.Call)
    return site.node


def argument(node: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The argument of a call with a name, or at a position (from 0)."""
    for word in node.keywords:
        if word.arg == name:
            return word.value
    if position is not None and len(node.args) > position:
        before = node.args[: position + 1]
        if not any(isinstance(part, ast.Starred) for part in before):
            return node.args[position]
    return None


def literal(node: ast.AST | None) -> object:
    """The value of a constant; Ellipsis for everything else."""
    return node.value if isinstance(node, ast.Constant) else ...


def last(node: ast.expr) -> str:
    """The last part of a name: 'step' for `self.optimizer.step`; '' for what is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """A name as it is written, 'self.optimizer'; '' for what is no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def words(node: ast.AST) -> set[str]:
    """All names and attributes in an expression, in lower case."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id.lower())
        elif isinstance(part, ast.Attribute):
            found.add(part.attr.lower())
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value.lower())
    return found


PLATFORM = ("cuda", "gpu", "tpu", "xla", "device", "cpu", "mps", "hardware", "accelerator")


def for_other_hardware(site: Site) -> bool:
    """Whether it stands under a test that asks what hardware there is."""
    return any(
        any(mark in word for word in words(test) for mark in PLATFORM)
        for test, _ in site.conditions()
    )
