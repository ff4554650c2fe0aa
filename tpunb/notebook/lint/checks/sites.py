"""What several rules ask: a call's receiver, values and ranks, and installed releases."""

from __future__ import annotations

import ast
import re

from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.scopes import Site, dotted, literal

TRIES = (ast.Try, ast.ExceptHandler)
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


def has_spread(node: ast.Call) -> bool:
    """Whether a call has `**` arguments, which may contain any name."""
    return any(word.arg is None for word in node.keywords)


def constant(notebook: NotebookIndex, node: ast.expr | None, site: Site) -> object:
    """Return the constant that an expression is, also by a name with only one value; else `...`."""
    values = {literal(value.node) for value in values_of(notebook, node, site)}
    return values.pop() if len(values) == 1 else ...


def is_tried(site: Site) -> bool:
    """Whether a site is in a `try` statement."""
    return any(isinstance(frame.node, TRIES) for frame in site.frame.outward())


def on_several_cores(notebook: NotebookIndex, site: Site) -> bool:
    """Whether several ranks run a site."""
    return any(site in program for program in notebook.programs if not program.alone)


def pins_older(notebook: NotebookIndex, package: str, release: tuple[int, int]) -> bool:
    """Whether a command of the notebook installs a package from before a release.

    `package` is a regular expression.
    """
    pin = re.compile(rf"(?<![\w-]){package}(?:\[[^\]]*\])?\s*(==|~=|<=?)\s*(\d+)(?:\.(\d+))?")
    for cell in notebook.cells:
        for _, text in cell.commands():
            for sign, major, minor in pin.findall(text):
                found = (int(major), int(minor or 0))
                if found < release or (sign == "<" and found == release):
                    return True
    return False


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


def asks_hardware(node: ast.AST) -> bool:
    """Whether an expression names a kind of hardware: `torch.cuda.is_available()`, `USE_TPU`."""
    return any(mark in word for word in words(node) for mark in PLATFORM)


def for_other_hardware(site: Site) -> bool:
    """Whether a site is under a condition on the hardware."""
    return any(asks_hardware(test) for test, _ in site.conditions())
