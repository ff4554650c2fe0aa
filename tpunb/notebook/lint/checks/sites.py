"""What several rules ask: a call's receiver and values, and conditions on the hardware."""

from __future__ import annotations

import ast

from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.scopes import Site, dotted, literal

PLATFORM = ("cuda", "gpu", "tpu", "xla", "device", "cpu", "mps", "hardware", "accelerator")


def receiver(site: Site) -> ast.expr | None:
    """Return the object of a method call: `x.y` for `x.y.f()`; None for `f()`."""
    function = site.call.func
    return function.value if isinstance(function, ast.Attribute) else None


def owner(site: Site) -> str:
    """Return the name of the object of a method call, as it is written; '' if it has none."""
    return dotted(site.call.func).rpartition(".")[0]


def values_of(notebook: NotebookIndex, node: ast.expr | None, site: Site) -> list[Site]:
    """Return the values that a name may have, or any other expression itself."""
    if isinstance(node, ast.Name):
        return notebook.values(node.id, site.frame)
    return [] if node is None else [Site(node, site.frame)]


def constant(notebook: NotebookIndex, node: ast.expr | None, site: Site) -> object:
    """Return the constant that an expression is, also by a name with only one value; else `...`."""
    values = {literal(value.node) for value in values_of(notebook, node, site)}
    return values.pop() if len(values) == 1 else ...


def is_tried(site: Site) -> bool:
    """Whether a site is in a `try` statement."""
    return any(
        isinstance(frame.node, ast.Try | ast.ExceptHandler) for frame in site.frame.outward()
    )


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


def for_other_hardware(site: Site) -> bool:
    """Whether a site is under a condition on the hardware: `torch.cuda.is_available()`,
    `USE_TPU`.
    """
    asked = {word for test, _ in site.conditions() for word in words(test)}
    return any(mark in word for word in asked for mark in PLATFORM)
