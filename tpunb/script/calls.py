"""`get_ipython().run_line_magic(…)` and its like, which is special syntax written as Python.

Exported notebooks are full of it, and people write it in libraries' examples.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.script.syntax import METHODS, Kind, Special

ARGUMENTS = {"run_line_magic": 2, "run_cell_magic": 3, "magic": 1, "system": 1, "getoutput": 1}
"""How many arguments of those that are understood are looked at (IPython 7.34 to 9.18)."""


def find(lines: list[str]) -> list[Special]:
    """The calls that are statements of their own, or assigned, and whose arguments are texts.

    None of them in a cell that is not Python.
    """
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    shells = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and gets_shell(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [special for node in ast.walk(tree) for special in _special(node, lines, shells)]


def gets_shell(node: ast.AST) -> bool:
    """Whether it is `get_ipython()`, or `IPython.get_ipython()`."""
    if not isinstance(node, ast.Call) or node.args or node.keywords:
        return False
    name = node.func
    return (isinstance(name, ast.Name) and name.id == "get_ipython") or (
        isinstance(name, ast.Attribute) and name.attr == "get_ipython"
    )


def _special(node: ast.AST, lines: list[str], shells: set[str]) -> Iterator[Special]:
    if not isinstance(node, ast.Expr | ast.Assign) or not isinstance(call := node.value, ast.Call):
        return
    method = call.func
    if not isinstance(method, ast.Attribute) or method.attr not in ARGUMENTS or call.keywords:
        return
    whose = method.value
    if not gets_shell(whose) and not (isinstance(whose, ast.Name) and whose.id in shells):
        return
    values = [part.value for part in call.args if isinstance(part, ast.Constant)]
    texts = [value for value in values if isinstance(value, str)]
    # `run_line_magic("matplotlib", "inline", 1)`: the depth of the stack does not matter.
    if len(texts) < ARGUMENTS[method.attr] or len(call.args) > 3:
        return
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: call.col_offset].decode()
    after = lines[last].encode()[call.end_col_offset :].decode().strip()
    if call.lineno != node.lineno or (after.rstrip(";") and not after.startswith("#")):
        return
    if isinstance(node, ast.Expr) and before.strip():
        return
    kind, name, argument = _meant(method.attr, texts)
    yield Special(kind, first, last - first + 1, before, name, argument, ast.unparse(call))


def _meant(method: str, texts: list[str]) -> tuple[Kind, str, str]:
    if method in METHODS:
        return METHODS[method], "", texts[0]
    if method == "run_cell_magic":
        return "cell", texts[0], "\n".join(texts[1:])
    text = " ".join(texts[:2]) if method == "run_line_magic" else texts[0]
    name, _, argument = text.lstrip("%").partition(" ")
    return "magic", name, argument.strip()
