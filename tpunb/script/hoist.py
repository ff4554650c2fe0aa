"""Statements that may stand anywhere in a cell, but not in the middle of a script."""

from __future__ import annotations
import __future__

import ast

from tpunb.script import statements

Statement = ast.ImportFrom | ast.Global

WORDS = ("__future__", "global ")
"""Cells without these words hold no such statement."""


def take_out(source: str, tree: ast.Module) -> tuple[str, list[str]]:
    """A cell without `from __future__` imports and `global` outside functions; the features.

    The first must stand at the top of a file. The second says nothing outside functions, and
    in a script it is an error where the name was used above. The lines stay where they are.
    """
    features: list[str] = []
    found: list[Statement] = []
    if not any(word in source for word in WORDS):
        return source, features
    for node in statements.executed(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            names = [alias.name for alias in node.names]
            # A feature that does not exist stays, and compiling the cell will say so.
            if all(name in __future__.all_feature_names for name in names):
                features += names
                found.append(node)
        elif isinstance(node, ast.Global) and not _in_class(tree, node):
            found.append(node)
    lines = source.split("\n")
    for node in reversed(found):
        if alone(lines, node) and not node.col_offset:
            for index in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[index] = f"# {lines[index]}"
        else:
            take_away(lines, node)
    return "\n".join(lines), features


def _in_class(tree: ast.Module, node: ast.Global) -> bool:
    """In the body of a class, `global` does say something."""
    classes = [one for one in statements.executed(tree) if isinstance(one, ast.ClassDef)]
    return any(node in statements.executed(one) for one in classes)


def alone(lines: list[str], node: ast.stmt) -> bool:
    """Whether a statement shares no line with others."""
    before, after = _around(lines, node)
    return not before.strip() and (not after.strip() or after.lstrip().startswith("#"))


def take_away(lines: list[str], node: ast.stmt) -> None:
    """Put `pass` in the place of a statement."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = _around(lines, node)
    lines[first] = f"{before}pass" + (after if first == last else "")
    for index in range(first + 1, last + 1):
        lines[index] = "#"
    if first != last:
        rest = after.lstrip().removeprefix(";").lstrip()
        indent = before if not before.strip() else before[: len(before) - len(before.lstrip())]
        lines[last] = f"{indent}{rest}" if rest else "#"


def _around(lines: list[str], node: ast.stmt) -> tuple[str, str]:
    """What stands on a statement's first line before it, and on its last line after it."""
    # Columns count bytes of UTF-8.
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode()
    return before, after
