"""Read notebook files, as cells or as a snapshot made without a kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpunb.notebook.errors import COMMAND, NotebookError, NotebookNotFoundError
from tpunb.notebook.models import Cell, Snapshot
from tpunb.utils.files import version_of

KINDS = ("code", "markdown", "raw")


def load_cells(path: str | os.PathLike[str]) -> tuple[Cell, ...]:
    """Return the cells of a notebook file of nbformat 4, in order.

    `number` is the execution count in the file, which may be from an earlier kernel. Outputs
    are ignored. Raises NotebookNotFoundError, and NotebookError for a file that cannot
    be read or is not a notebook.
    """
    return cells_from_json(load_notebook(path), str(path))


def load_notebook(path: str | os.PathLike[str]) -> Any:
    """Return a decoded notebook without outputs; the same, not to be changed, until the file is.

    Raises as above, but not if it is JSON and no notebook.
    """
    place = os.path.realpath(path)
    return _load(place, version_of(place), str(path))


@lru_cache(maxsize=4)
def _load(place: str, version: object, path: str) -> Any:
    try:
        with open(place, encoding="utf-8-sig") as file:
            text = file.read()
    except FileNotFoundError:
        raise NotebookNotFoundError(str(path), COMMAND) from None
    except OSError as error:
        raise NotebookError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise NotebookError(f"{path} is not a notebook: it is not UTF-8 text") from error
    try:
        notebook = json.loads(text)
        with suppress(KeyError, TypeError):  # not a notebook, as its reader will say
            return without_outputs(notebook)
        return notebook
    except (ValueError, RecursionError) as error:
        raise NotebookError(
            f"{path} is not valid JSON ({error}). Save the notebook again, or name another file."
        ) from error


def without_outputs(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decoded notebook without outputs, which may be large and are not needed."""
    cells = [{**cell, "outputs": []} if "outputs" in cell else cell for cell in notebook["cells"]]
    return {**notebook, "cells": cells}


def cells_from_json(notebook: Any, name: str) -> tuple[Cell, ...]:
    """Return the cells of a notebook decoded from JSON, in order, as `load_cells` does.

    Raises NotebookError, which calls the notebook `name`, if it is not a notebook.
    """
    # Without nbformat, which validates all outputs, takes a while to import, and warns about
    # problems that do not matter for this purpose: missing cell ids, malformed outputs.
    try:
        if (version := notebook.get("nbformat", 4)) != 4:
            raise ValueError(f"nbformat version {version} is not known")
        return tuple(_cell(index, node) for index, node in enumerate(notebook["cells"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotebookError(
            f"{name} is JSON but not a notebook ({detail}). Save the notebook again, "
            "or name another file."
        ) from error


def _cell(index: int, node: Any) -> Cell:
    kind = node["cell_type"]
    if kind not in KINDS:
        raise ValueError(f"cell {index + 1} has the unknown type {kind!r}")
    source = node["source"]
    if isinstance(source, list):  # on disk, and from Colab, a list of lines
        source = "".join(source)
    if not isinstance(source, str):
        raise TypeError(f"the source of cell {index + 1} is not text")
    metadata = node.get("metadata", {})
    return Cell(
        index,
        kind,
        source,
        # Colab saves 0 for cells that did not run in its last session.
        number=node.get("execution_count") or None if kind == "code" else None,
        id=node.get("id") or metadata.get("id"),  # Colab writes the id to the metadata
        tags=tuple(str(tag) for tag in metadata.get("tags", ())),
    )


def cell_magics(source: str) -> list[str]:
    """Names of the cell magics at the top of a cell, outermost first: ['time', 'tpu_train'].

    Blank lines and comments above and between them are skipped.
    """
    names = []
    for line in source.split("\n"):  # only "\n" ends a line of Python, not U+2028 or a form feed
        if line.startswith("%%"):
            names.append(line[2:].split(maxsplit=1)[0] if line[2:].strip() else "")
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return names


def load_snapshot(path: str | os.PathLike[str], cell: str | None = None) -> Snapshot:
    """Return a snapshot of a notebook file, made without a kernel.

    `cell` names the train cell: by its id, otherwise by the number shown next to it, otherwise
    by its position among the code cells (from 1). Without `cell` the train cell is the last
    `%%tpu_train` cell, if there is one. Raises NotebookNotFoundError and NotebookError.
    """
    cells = load_cells(path)
    trains = [c.index for c in cells if c.kind == "code" and "tpu_train" in cell_magics(c.source)]
    if cell is not None:
        trains = [_named(cells, cell, path).index]
    return Snapshot(
        cells,
        train=trains[-1] if trains else None,
        path=str(Path(path).absolute()),
        origin="the notebook file",
        name=Path(path).stem,
    )


def _named(cells: tuple[Cell, ...], name: str, path: str | os.PathLike[str]) -> Cell:
    code = [cell for cell in cells if cell.kind == "code"]
    matches = [cell for cell in code if cell.id == name]
    if not matches and name.isdecimal():
        matches = [cell for cell in code if cell.number == int(name)]
        matches = matches or code[int(name) - 1 : int(name)] if int(name) else matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = ", ".join(cell.id or "(no id)" for cell in matches)
        raise NotebookError(
            f"{len(matches)} cells of {path} show the number [{name}]. Name the cell by its id: "
            f"{choices}."
        )
    shown = ", ".join(
        str(at) if c.number is None else f"[{c.number}]" for at, c in enumerate(code, 1)
    )
    raise NotebookError(
        f"{path} has no code cell {name!r}. Name one by its number, by its position among the "
        f"code cells, or by its id. The code cells are: {shown or 'none'}."
    )
