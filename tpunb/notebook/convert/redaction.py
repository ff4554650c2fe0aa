"""Reduce a notebook to what is written to the run folder: without cells marked as skipped.

The guide recommends such cells for secrets, and none elsewhere. Commands and files are an
exception that is easily forgotten: `%%tpu_train --env TOKEN=…`, `!git clone https://TOKEN@…`,
`%%bash` with `export TOKEN=…`, `%%writefile .env`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tpunb.notebook.convert import magics
from tpunb.notebook.convert.cells import SKIP_LINE, skip_reason
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Snapshot
from tpunb.utils.secrets import without_secrets

NOT_KEPT = f"{SKIP_LINE}\n# (not kept)"


def redacted_source(source: str, tags: Iterable[str] = ()) -> str:
    """Return the text of a code cell to be written, line for line unless the cell is skipped."""
    if skip_reason(source, tags):
        return NOT_KEPT
    if "%" not in source and "!" not in source:
        return source
    lines = source.split("\n")
    # IPython also accepts indented cells, whose first lines are magics all the same.
    names = cell_magics("\n".join(line.lstrip() for line in lines))
    if any(name not in magics.UNWRAPPED and name != "tpu_debug" for name in names):
        return without_secrets(source)  # a program or a file
    continued = False
    for index, line in enumerate(lines):
        command = continued or line.lstrip().startswith(("%", "!"))
        lines[index] = without_secrets(line) if command else line
        continued = command and line.endswith("\\")
    return "\n".join(lines)


def redacted_snapshot(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot to be written to `notebook.json`."""
    cells = tuple(
        replace(cell, source=redacted_source(cell.source, cell.tags))
        if cell.kind == "code"
        else cell
        for cell in snapshot.cells
    )
    left_out = tuple(
        (replace(cell, source=redacted_source(cell.source, cell.tags)), why)
        for cell, why in snapshot.left_out
    )
    return replace(snapshot, cells=cells, left_out=left_out, content=None)


def redacted_notebook(notebook: Mapping[str, Any]) -> str:
    """Return the text for `notebook.ipynb`, of a decoded notebook without outputs."""
    cells = [_redacted_cell(cell) for cell in notebook["cells"]]
    return json.dumps({**notebook, "cells": cells}, indent=1, ensure_ascii=False) + "\n"


def _redacted_cell(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    source = "".join(cell["source"])
    kept = redacted_source(source, cell.get("metadata", {}).get("tags", ()))
    if cell["cell_type"] != "code" or kept == source:
        return cell
    return {**cell, "source": kept.splitlines(keepends=True)}
