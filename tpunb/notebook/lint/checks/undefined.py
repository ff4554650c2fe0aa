"""Lint rule on undefined names, which pyflakes finds in the cells joined to one program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook.convert.magics import RUN_NOTEBOOK
from tpunb.notebook.convert.names import defines_unseen
from tpunb.notebook.lint.checks.sites import is_tried
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.scopes import ParsedCell

USUAL = {
    "xm": "import torch_xla.core.xla_model as xm",
    "xmp": "import torch_xla.distributed.xla_multiprocessing as xmp",
    "xr": "import torch_xla.runtime as xr",
    "torch_xla": "import torch_xla",
}
"""The usual names of torch_xla's modules, with their imports."""
IPYTHON = frozenset("display get_ipython In Out exit quit open __file__ __IPYTHON__".split())
"""Names that a kernel defines in addition to Python's builtins."""
_MAGIC = re.compile(r"\s*([%!]|[\w, ]+=\s*[%!])")
_OWN = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[io]h|_dh|_tpunb_\w+")
"""IPython's history variables, and names that the conversion adds to cells."""


@rule(
    "undefined-name",
    "error",
    what="a name that no cell defines, or only a cell below",
    why="NameError when the line runs: on every core, perhaps at the end of the training "
    "(pyflakes, on the cells in the notebook's order)",
    fix="define or import it in a cell above",
    kernel=True,
)
def _undefined_name(notebook: NotebookIndex) -> Iterator[Hit]:
    cells = [cell for cell in notebook.cells if cell.part != "kernel"]
    if notebook.sites.stars or any(cell.problem for cell in notebook.cells):
        return
    sources = ["\n".join(cell.plain) for cell in cells]
    if defines_unseen(sources) or any(f"{RUN_NOTEBOOK}(" in source for source in sources):
        return
    if any("%tpu_attach" in line for cell in notebook.cells for line in cell.lines):
        return  # may bind names that the attached run returned
    elsewhere = set().union(
        *(notebook.sites.bound(cell) for cell in notebook.cells if cell.part == "kernel"),
        *(_words_of_magics(cell) for cell in notebook.cells),
    )
    if any("_tpunb_setup_shell(" in source for source in sources):
        elsewhere.add("_exit_code")
    for cell, node in _undefined(cells):
        name = node.id
        if name in elsewhere or name in notebook.held or _OWN.fullmatch(name):
            continue
        below = [other for other in cells if name in notebook.sites.bound(other)]
        at = (cell.index, node.lineno)
        site = next((load for load in notebook.sites.loads(name) if load.place == at), None)
        always = site is not None and not any(site.conditions()) and not is_tried(site)
        if below:
            if cell.part == "train" or not always:
                continue  # the kernel may have a value for it
            message = f"`{name}` is defined only below, in cell [{below[0].number}]"
        else:
            message = f"`{name}` is not defined in any cell"
        yield Hit(
            site or (cell, node.lineno),
            message,
            f"write `{USUAL[name]}` in a cell above" if name in USUAL else None,
            severity=None if always else "warning",
            certain=not below,
        )


def _words_of_magics(cell: ParsedCell) -> set[str]:
    """Names that magics and shell lines may define: `%%cython`, `%%capture out`, `a = !ls`."""
    other = any(cell.lines[line - 1].startswith("%%") for line in cell.left_out)
    lines = cell.lines if other else filter(_MAGIC.match, cell.lines)
    return {word for line in lines for word in re.findall(r"\w+", line)}


def _undefined(cells: list[ParsedCell]) -> Iterator[tuple[ParsedCell, ast.Name]]:
    """Yield the names that pyflakes reports, each with its cell and the line in that cell."""
    from pyflakes.checker import Checker
    from pyflakes.messages import UndefinedName

    lines = [line for cell in cells for line in cell.plain]
    owners = [(cell, at) for cell in cells for at in range(1, len(cell.plain) + 1)]
    try:
        program = ast.parse("\n".join(lines))
        reported = Checker(program, builtins=IPYTHON, withDoctest=False).messages
    except (SyntaxError, RecursionError):  # a `from __future__` import in a later cell
        return
    found = {
        (message.lineno, message.col, message.message_args[0])
        for message in reported
        if isinstance(message, UndefinedName)
    }
    if not found:
        return
    for node in _executed_names(program):
        if (node.lineno, node.col_offset, node.id) in found:
            cell, node.lineno = owners[node.lineno - 1]
            yield cell, node


def _executed_names(program: ast.Module) -> list[ast.Name]:
    """The names in a program in order, except in annotations that are never evaluated."""
    postponed = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in program.body
    )
    names: list[ast.Name] = []
    todo: list[ast.AST] = [program]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name):
            names.append(node)
        for field, value in ast.iter_fields(node):
            if postponed and field in ("annotation", "returns"):
                continue
            parts = value if isinstance(value, list) else [value]
            todo += [part for part in parts if isinstance(part, ast.AST)]
    return sorted(names, key=lambda name: (name.lineno, name.col_offset))
