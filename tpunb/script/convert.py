"""A captured notebook as a Python script: `Snapshot` → `Script`."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.models import Block, Cell, CellKind, Omission, Role, Script, Snapshot
from tpunb.script import syntax
from tpunb.script.embedding import Files
from tpunb.script.preprocessors import STEPS

if TYPE_CHECKING:
    from nbconvert.exporters import PythonExporter
    from nbformat import NotebookNode

TEMPLATES = Path(__file__).parent / "templates"


def convert(snapshot: Snapshot) -> Script:
    """The script that `%%tpu_train` runs: the cells above the train cell, then its body.

    With `snapshot.train` None it is all code cells. Left out, each with an Omission, are
    cells with the tag `tpu-skip` or the first line `# tpu: skip`, `%%tpu_debug` cells, other
    train cells, and what is below the train cell. Every other code cell is a block of as many
    lines as the cell has, so line k of the cell is line `first + k - 1` of the script; magics
    and shell lines are replaced in their place, and those that do not run in a script give an
    Omission.

    The text is `py:percent`, runs without tpunb, as `python script.py` on one core and under
    torchrun on several. Raises ConversionError, with cell and line, where a cell is not
    Python or could not work outside a notebook.
    """
    positions = _positions(snapshot.cells)
    cells = [_node(cell, positions[cell.index], snapshot.train) for cell in snapshot.cells]
    resources: dict[str, Any] = {
        "train": snapshot.train,
        "notebook": snapshot.path,
        "omissions": [],
        "features": [],
        "lost": [],
        "elsewhere": [
            (snapshot.called(cell), reason, cell.source) for cell, reason in snapshot.left_out
        ],
        "files": Files(_folders(snapshot.path)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warned about the cells when they ran
        body, made = exporter().from_notebook_node(_notebook(cells), resources)
    omissions: list[tuple[int, Omission]] = made["omissions"]
    omissions.sort(key=lambda one: (one[0], one[1].line))
    return Script(
        body,
        _blocks(body, made["header"], made["cells"]),
        tuple(omission for _, omission in omissions),
        made["spmd"],
    )


@cache
def exporter() -> PythonExporter:
    """Nbconvert's exporter with our template and steps, made once."""
    from nbconvert.exporters import PythonExporter
    from traitlets import Bool

    class ScriptExporter(PythonExporter):  # here, because nbconvert is imported lazily
        # The steps make no cells that nbformat does not know, and validating after each of
        # them takes longer than all of them together.
        optimistic_validation = Bool(True)

    return ScriptExporter(  # type: ignore[no-untyped-call]
        template_name="percent",
        extra_template_basedirs=[str(TEMPLATES)],
        default_preprocessors=[],
        preprocessors=list(STEPS),
    )


def warm_up() -> None:
    """Import and build what makes the first conversion slow (seconds); the result is kept."""
    syntax.warm_up()
    convert(Snapshot((), None, None, "nothing"))


def _folders(notebook: str | None) -> list[str]:
    """Where the files are that a notebook names: where it works now, then where it lies."""
    folders = [os.getcwd()]
    return [*folders, os.path.dirname(os.path.abspath(notebook))] if notebook else folders


def _positions(cells: tuple[Cell, ...]) -> list[int]:
    """For each cell, how many code cells there are up to it: the number of one that never ran."""
    seen = 0
    return [seen := seen + (_kind(cell) == "code") for cell in cells]


def _notebook(cells: list[dict[str, Any]]) -> NotebookNode:
    from nbformat import from_dict

    # As data: nbformat's constructors validate each cell, for longer than the rest takes.
    notebook: NotebookNode = from_dict(
        {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    )
    return notebook


def _kind(cell: Cell) -> CellKind:
    """What a cell is in a script: jupytext's tag makes code of a raw cell there."""
    return "code" if cell.kind == "raw" and "active-py" in cell.tags else cell.kind


def _node(cell: Cell, position: int, train: int | None) -> dict[str, Any]:
    """A cell for nbconvert, with what its steps need to know in the metadata."""
    role: Role = "train" if cell.index == train else "prelude"
    code: dict[str, Any] = {"execution_count": None, "outputs": []}
    return (code if _kind(cell) == "code" else {}) | {
        "id": f"cell-{cell.index}",
        "cell_type": _kind(cell),
        # A carriage return ends a line in a Python file, as it does in the kernel.
        "source": cell.source.replace("\r\n", "\n").replace("\r", "\n"),
        "metadata": {
            "index": cell.index,
            "number": position if cell.number is None else cell.number,
            "role": role,
            "tags": cell.tags,
        },
    }


def _blocks(body: str, header: str, cells: list[Any]) -> tuple[Block, ...]:
    """Where each cell is in the script; the template's layout, counted."""
    lines = body.split("\n")
    end = header.count("\n")
    blocks = [Block("header", 1, end)]
    end += 1  # the blank line below the header
    for cell in cells:
        source = cell.source.split("\n")
        first, last = end + 2, end + 1 + len(source)  # below its title
        if lines[first - 1 : last] != source:
            raise AssertionError(f"the template does not keep the lines of {cell.source!r}")
        end = last + 1  # the blank line below it
        if cell.cell_type == "code":
            data = cell.metadata
            blocks.append(Block(data.role, first, last, data.index, data.number))
    return tuple(blocks)
