"""Notebook in, the notebook of a script out: the steps of a conversion, for nbconvert.

Each is `(nb, resources) -> (nb, resources)`. Cells carry `index`, `number`, `role` and `tags`
in their metadata; `resources` collects what the header needs and what is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from tpunb.errors import ConversionError
from tpunb.models import Omission
from tpunb.script import awaiting, compiling, elsewhere, header, hoist, names, spmd, statements
from tpunb.script.cells import SKIP_LINE, SKIP_TAGS, NotPythonError, magics, plain
from tpunb.script.embedding import Files
from tpunb.script.frontend import FrontEnd, concerns
from tpunb.script.leaving import Cell

Notebook = Any
Resources = dict[str, Any]

KERNEL_ONLY = tuple(header.BUILTINS)
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
            resources["elsewhere"].append((f"cell [{number}]", reason, cell.source))
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
    heads = magics(cell.source)
    for tag in sorted(SKIP_TAGS & set(cell.metadata.tags)):
        return f"it is tagged {tag}"
    if cell.source.lstrip().partition("\n")[0].strip() == SKIP_LINE:
        return f"it begins with '{SKIP_LINE}'"
    if "tpu_debug" in heads:
        return "it runs in the notebook only"
    if "tpu_train" in heads:
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
        _note(resources, cell, made.left_out)
        cell.source = "\n".join(made.lines)
        cell.metadata.compiles = made.compiles
        resources["lost"] += [(number, lost) for lost in made.lost]
    return nb, resources


def _note(resources: Resources, cell: Any, left_out: Iterable[tuple[int, str, str]]) -> None:
    for line, text, reason in left_out:
        omission = Omission(cell.metadata.number, line, text, reason)
        resources["omissions"].append((cell.metadata.index, omission))


def other_files(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Take in what `%run` runs."""
    files: Files = resources["files"]
    for cell in _code(nb):
        cell.source = files.take(cell.source, cell.metadata.number)
        resources["omissions"] += [(cell.metadata.index, one) for one in files.omissions]
        files.omissions.clear()
    return nb, resources


def without_front_end(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Leave out what asks the notebook's front end or the person before it."""
    if not any(concerns(cell.source) for cell in _code(nb)):
        return nb, resources
    trees = [(cell, compiling.parsed(cell.source, cell.metadata.number)) for cell in _code(nb)]
    front = FrontEnd([tree for _, tree in trees])
    for cell, tree in trees:
        made = Cell(cell.source.split("\n"))
        front.leave_out(made, tree, cell.metadata.role == "prelude")
        if made.left_out:
            _note(resources, cell, made.left_out)
            cell.source = "\n".join(made.lines)
            cell.metadata.compiles = False
            resources["lost"] += [(cell.metadata.number, lost) for lost in made.lost]
        front.refuse(cell.source, cell.metadata.number)
    return nb, resources


def as_one_file(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Take out what cannot stand in the middle of a file, and check that every cell compiles."""
    kernel_only: list[tuple[Any, ast.Module]] = []
    for cell in _code(nb):
        named = any(name in cell.source for name in KERNEL_ONLY)
        if not cell.metadata.compiles or named or any(w in cell.source for w in hoist.WORDS):
            tree = compiling.parsed(cell.source, cell.metadata.number)
            if not cell.metadata.compiles and "await" in cell.source:
                written = awaiting.written_out(cell.source, tree)
                if written != cell.source:
                    resources["files"].helpers.add(awaiting.HELPER)
                    cell.source, tree = written, compiling.parsed(written, cell.metadata.number)
            source, features = hoist.take_out(cell.source, tree)
            cell.metadata.compiles &= source == cell.source
            cell.source = source
            resources["features"] += features
            kernel_only += [(cell, tree)] if named else []
    for cell in _code(nb):
        if resources["features"] or not cell.metadata.compiles:
            compiling.check(cell.source, cell.metadata.number, resources["features"])
    embedded = [ast.parse(source) for source in resources["files"].sources(header.BUILTINS)]
    trees = [*embedded, *(tree for _, tree in kernel_only)]
    known = {name for tree in trees for name in statements.bound(tree)}
    used = {name for tree in trees for name in statements.used(tree)}
    for cell, tree in kernel_only:
        compiling.refuse_kernel_only(tree, cell.metadata.number, cell.source, known)
    resources["missing"] = [name for name in header.BUILTINS if name in used - known]
    return nb, resources


def read_as_a_whole(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Refuse cells that need what only the notebook has; see whether the run is one of SPMD."""
    pieces = [names.Piece(cell.metadata.number, cell.source) for cell in _code(nb)]
    names.refuse(pieces, elsewhere.made(resources["elsewhere"], resources["lost"]))
    resources["spmd"] = spmd.reason(pieces)
    return nb, resources


def layout(nb: Notebook, resources: Resources) -> tuple[Notebook, Resources]:
    """Write the header and the cells' titles, and comment out the text of all other cells."""
    resources["header"] = header.text(
        resources["notebook"],
        resources["features"],
        resources["missing"],
        resources["files"].helpers,
        resources["files"].notebooks,
        spmd=resources["spmd"] is not None,
    )
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.metadata.title = _title(cell, resources["spmd"] is not None)
        else:
            cell.metadata.title = f"# %% [{cell.cell_type}]"
            cell.source = "\n".join(_commented(line) for line in cell.source.split("\n"))
    resources["cells"] = nb.cells
    return nb, resources


def _title(cell: Any, spmd: bool) -> str:
    title = f"# %% cell {cell.metadata.number}"
    if cell.metadata.role == "train":
        title += ", on all cores" if spmd else ", on every core"
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


STEPS = (
    leave_out,
    plain_python,
    other_files,
    without_front_end,
    as_one_file,
    read_as_a_whole,
    layout,
)
