"""Notebook in, the notebook of a script out: the steps of a conversion, for nbconvert.

Each is `(nb, resources) -> (nb, resources)`. Cells carry `index`, `number`, `role` and `tags`
in their metadata; `resources` collects what the header needs and what is left out.
"""

from __future__ import annotations

import ast
from typing import Any

from tpunb.errors import ConversionError
from tpunb.models import Omission
from tpunb.script import compiling, header, hoist, statements
from tpunb.script.cells import NotPythonError, magics, plain

Notebook = Any
Resources = dict[str, Any]

SKIP_TAG = "tpu-skip"
SKIP_LINE = "# tpu: skip"
KERNEL_ONLY = (*header.BUILTINS, "input")
"""Names that mean something else, or nothing, outside a notebook."""


def leave_out(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Replace cells that are not part of the run by a line that says so; drop those below."""
    train = resources["train"]
    kept = []
    for cell in nb.cells:
        below = train is not None and cell.metadata.index > train
        reason = _why_not(cell, below) if cell.cell_type == "code" else None
        if reason is not None and cell.source.strip():
            number, line = cell.metadata.number, _first_line(cell.source)
            omission = Omission(number, 1, line, reason)
            resources["omissions"].append((cell.metadata.index, omission))
            cell.cell_type = "markdown"
            del cell["outputs"], cell["execution_count"]  # nbconvert checks the result
            cell.source = f"cell [{number}] is left out, {reason}: {line}"
        if not below and (cell.source.strip() or cell.metadata.role == "train"):
            kept.append(cell)
    nb.cells = kept
    return nb, resources


def _why_not(cell: Any, below: bool) -> str | None:
    if cell.metadata.role == "train":
        return None
    names = magics(cell.source)
    if SKIP_TAG in cell.metadata.tags:
        return f"it is tagged {SKIP_TAG}"
    if cell.source.lstrip().partition("\n")[0].strip() == SKIP_LINE:
        return f"it begins with '{SKIP_LINE}'"
    if "tpu_debug" in names:
        return "it runs in the notebook only"
    if "tpu_train" in names:
        return "it is another train cell"
    return "it is below the train cell" if below else None


def _first_line(source: str) -> str:
    line = source.strip().partition("\n")[0].strip()
    return line if len(line) <= 60 else f"{line[:59]}…"


def plain_python(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Replace IPython's special syntax."""
    for cell in _code(nb):
        number = cell.metadata.number
        try:
            made = plain(cell.source)
        except NotPythonError as error:
            shown = cell.source.split("\n")[error.line - 1]
            raise ConversionError(error.reason, number, error.line, shown) from None
        for line, text, reason in sorted(made.left_out):
            omission = Omission(number, line, text, reason)
            resources["omissions"].append((cell.metadata.index, omission))
        cell.source = "\n".join(made.lines)
    return nb, resources


def as_one_file(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Take out what cannot stand in the middle of a file, and check that every cell compiles."""
    kernel_only: list[tuple[Any, ast.Module]] = []
    for cell in _code(nb):
        tree = compiling.parsed(cell.source, cell.metadata.number)
        cell.source, features = hoist.take_out(cell.source, tree)
        resources["features"] += features
        if any(name in cell.source for name in KERNEL_ONLY):
            kernel_only.append((cell, tree))
    for cell in _code(nb):
        compiling.check(cell.source, cell.metadata.number, resources["features"])
    known = {name for _, tree in kernel_only for name in statements.bound(tree)}
    used = {name for _, tree in kernel_only for name in statements.used(tree)}
    for cell, tree in kernel_only:
        compiling.refuse_kernel_only(tree, cell.metadata.number, cell.source, known)
    resources["missing"] = [name for name in header.BUILTINS if name in used - known]
    return nb, resources


def layout(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Write the header and the cells' titles, and comment out the text of all other cells."""
    resources["header"] = header.text(
        resources["notebook"], resources["features"], resources["missing"]
    )
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.metadata.title = _title(cell)
        else:
            cell.metadata.title = f"# %% [{cell.cell_type}]"
            cell.source = "\n".join(_commented(line) for line in cell.source.split("\n"))
    resources["cells"] = nb.cells
    return nb, resources


def _title(cell: Any) -> str:
    title = f"# %% cell {cell.metadata.number}"
    if cell.metadata.role == "train":
        title += ", on every core"
    if cell.metadata.tags:
        quoted = ", ".join('"{}"'.format(tag.replace('"', "'")) for tag in cell.metadata.tags)
        title += f" tags=[{quoted}]"
    return " ".join(title.split())


def _commented(line: str) -> str:
    # A line of text may not look like the beginning of a cell. Null characters are not
    # allowed anywhere in a Python file.
    line = line.replace("\0", "\N{REPLACEMENT CHARACTER}")
    mark = "# | " if line.lstrip().startswith("%%") else "# "
    return f"{mark}{line}".rstrip()


def _code(nb: Notebook) -> list[Any]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


STEPS = (leave_out, plain_python, as_one_file, layout)
