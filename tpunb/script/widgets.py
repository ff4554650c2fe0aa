"""Widgets of a notebook whose values a person chooses (ipywidgets 7.7 to 8.1)."""

from __future__ import annotations

import ast
from collections.abc import Sequence

VALUES = ("value", "result", "kwargs", "index", "label", "selected_index")
"""Attributes that hold what was chosen."""

_ONLY_SHOW = (
    *("IntProgress", "FloatProgress", "HTML", "HTMLMath", "Label", "Image", "Video", "Audio"),
    *("Output", "Valid", "Box", "HBox", "VBox", "GridBox", "Layout"),
)


def made(trees: Sequence[ast.Module]) -> dict[str, str]:
    """The names that the cells give to such widgets, and the widgets' kinds.

    A widget whose value the cells set themselves is not among them.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules, classes = _imported(nodes)
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            kind = _kind(node.value.func, modules, classes)
            if kind and kind not in _ONLY_SHOW:
                found |= {one.id: kind for one in node.targets if isinstance(one, ast.Name)}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if isinstance(node.ctx, ast.Store) and node.attr in VALUES:
            found.pop(node.value.id, None)
    return found


def _imported(nodes: Sequence[ast.AST]) -> tuple[set[str], dict[str, str]]:
    modules: set[str] = set()
    classes: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {one.asname or one.name for one in node.names if one.name == "ipywidgets"}
        elif isinstance(node, ast.ImportFrom) and node.module == "ipywidgets":
            for one in node.names:
                if one.name == "widgets":
                    modules.add(one.asname or one.name)
                else:
                    classes[one.asname or one.name] = one.name
    return modules, classes


def _kind(made: ast.expr, modules: set[str], classes: dict[str, str]) -> str | None:
    if isinstance(made, ast.Name):
        return classes.get(made.id)
    if isinstance(made, ast.Attribute) and isinstance(made.value, ast.Name):
        return made.attr if made.value.id in modules else None
    return None
