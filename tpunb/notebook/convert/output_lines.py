"""Values of `x = !command` with the attributes of IPython's lists, for names whose code uses them.

Without such a use, the value is a plain list, which every process can unpickle.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

HELPER = "_tpunb_output"
"""Function in a script's header that returns the output lines of a command."""

BEGIN, END = '__import__("subprocess").getoutput(', ").splitlines()"
_ATTRIBUTES = frozenset("l list n nlstr s spstr p paths grep fields sort".split())
"""What IPython's SList adds to a list (7.34 to 9.18)."""


def expression(command: str) -> str:
    """Return a Python expression for the output lines of a command, as a plain list."""
    return f"{BEGIN}{command}{END}"


def names_with_attributes(sources: Sequence[str]) -> set[str]:
    """Return the names of output lines of which some code reads an attribute that a list lacks."""
    if not any(BEGIN in source for source in sources):
        return set()
    trees = [_parsed(source) for source in sources]
    assigned = {target.id for tree in trees for node in _outputs(tree) for target in _names(node)}
    return assigned & {
        node.value.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in _ATTRIBUTES
        and isinstance(node.value, ast.Name)
    }


def with_attributes(source: str, names: Collection[str]) -> str:
    """Replace the plain lists that are assigned to these names; no line is moved."""
    if BEGIN not in source:
        return source
    lines = [line.encode() for line in source.split("\n")]
    for node in _outputs(_parsed(source)):
        value, row = node.value, lines[node.value.lineno - 1]
        whole = row[value.col_offset : value.end_col_offset].decode()
        if any(target.id in names for target in _names(node)) and whole.startswith(BEGIN):
            call = f"{HELPER}({whole[len(BEGIN) : -len(END)]})"
            rest = row[value.end_col_offset :]
            lines[value.lineno - 1] = row[: value.col_offset] + call.encode() + rest
    return b"\n".join(lines).decode()


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module([], [])  # a later step reports the error


def _outputs(tree: ast.AST) -> list[ast.Assign]:
    """Return the assignments of output lines, in which `expression` fills the rest of the line."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and node.value.lineno == node.value.end_lineno
        and ast.unparse(node.value).startswith("__import__('subprocess').getoutput(")
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "splitlines"
    ]


def _names(node: ast.Assign) -> list[ast.Name]:
    return [target for target in node.targets if isinstance(target, ast.Name)]
