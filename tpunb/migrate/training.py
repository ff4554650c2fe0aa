"""Making a notebook one for `%%tpu_train`."""

from __future__ import annotations

import ast
import copy
from typing import Any

from tpunb.migrate.cells import CodeCell
from tpunb.migrate.changes import LOAD, Change, text_of

STARTERS = frozenset(("launch", "spawn", "notebook_launcher"))
"""The last names of `torch_xla.launch`, `xmp.spawn` and accelerate's `notebook_launcher`."""


def make_training(notebook: dict[str, Any]) -> tuple[list[Change], int | None]:
    """Put `%load_ext tpunb` at the top and `%%tpu_train` over the cells that start ranks.

    What was done, and the index of the cell that was added.
    """
    added = None
    changes = []
    codes = [
        index for index, cell in enumerate(notebook["cells"]) if cell.get("cell_type") == "code"
    ]
    parsed = {index: CodeCell(index, text_of(notebook["cells"][index])) for index in codes}
    trees = {
        index: ast.parse(cell.module.code)
        for index, cell in parsed.items()
        if cell.module is not None
    }
    starters = _functions(list(trees.values()))
    for index, tree in trees.items():
        cell = notebook["cells"][index]
        text = text_of(cell)
        if not _calls(tree.body, starters) or text.lstrip().startswith(
            ("%%tpu_train", "%%tpu_debug")
        ):
            continue
        line = "%%tpu_train\n"
        cell["source"] = line + text if isinstance(cell["source"], str) else [line, *cell["source"]]
        changes.append(
            Change(index, 1, "rewritten", text.lstrip().partition("\n")[0], "%%tpu_train above it")
        )
    if changes and not any(
        "%load_ext tpunb" in text_of(notebook["cells"][index]) for index in codes
    ):
        added = codes[0]
        notebook["cells"].insert(codes[0], _loading(notebook, codes[0]))
        changes.insert(0, Change(codes[0], 1, "rewritten", "", f"a new cell: {LOAD}"))
    return changes, added


def _functions(trees: list[ast.Module]) -> frozenset[str]:
    """The names that start ranks when they are called, the notebook's own functions included."""
    names = set(STARTERS)
    functions = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    grown = True
    while grown:
        grown = False
        for function in functions:
            if function.name not in names and _calls(function.body, frozenset(names)):
                names.add(function.name)
                grown = True
    return frozenset(names)


def _calls(body: list[ast.stmt], names: frozenset[str]) -> bool:
    """Whether statements call one of these names when they run, and not in a function in them."""
    nodes: list[ast.AST] = list(body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            if name in names and not _is_other(function):
                return True
        nodes += ast.iter_child_nodes(node)
    return False


def _is_other(function: ast.expr) -> bool:
    """`subprocess.launch(…)` and the like: `launch` and `spawn` of something else."""
    if not isinstance(function, ast.Attribute) or function.attr not in ("launch", "spawn"):
        return False
    root = function.value
    name = root.id if isinstance(root, ast.Name) else getattr(root, "attr", "")
    return name not in ("torch_xla", "xmp", "xla_multiprocessing", "mp", "multiprocessing")


def _loading(notebook: dict[str, Any], before: int) -> dict[str, Any]:
    """A new code cell, in the form of the cell that follows it."""
    model = notebook["cells"][before]
    cell = copy.deepcopy({name: model[name] for name in model if name in ("cell_type", "id")})
    if "id" in cell:
        cell["id"] = "tpunb-load"
    cell |= {"execution_count": None, "metadata": {}, "outputs": []}
    cell["source"] = LOAD if isinstance(model["source"], str) else [LOAD]
    return cell
