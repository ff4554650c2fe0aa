"""Statements that may stand anywhere in a cell, but not in the middle of a script."""

from __future__ import annotations
import __future__

import ast

from tpunb.script import statements

Statement = ast.ImportFrom | ast.Global


def take_out(source: str, tree: ast.Module) -> tuple[str, list[str]]:
    """A cell without `from __future__` imports and `global` outside functions; the features.

    The first must stand at the top of a file. The second says nothing outside functions, and
    in a script it is an error where the name was used above. The lines stay where they are.
    """
    features: list[str] = []
    found: list[Statement] = []
    if "__future__" not in source and "global" not in source:
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
        _replace(lines, node)
    return "\n".join(lines), features


def _in_class(tree: ast.Module, node: ast.Global) -> bool:
    """In the body of a class, `global` does say something."""
    classes = [one for one in statements.executed(tree) if isinstance(one, ast.ClassDef)]
    return any(node in statements.executed(one) for one in classes)


def _replace(lines: list[str], node: Statement) -> None:
    """Turn a statement into a comment, or into `pass` where it shares lines with others."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    # Columns count bytes of UTF-8.
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    if not before and (not after.strip() or after.lstrip().startswith("#")):
        for index in range(first, last + 1):
            lines[index] = f"# {lines[index]}"
        return
    lines[first] = f"{before}pass" + (after if first == last else "")
    for index in range(first + 1, last + 1):
        lines[index] = "#"
    if first != last:
        rest = after.lstrip().removeprefix(";").lstrip()
        indent = before if not before.strip() else before[: len(before) - len(before.lstrip())]
        lines[last] = f"{indent}{rest}" if rest else "#"
