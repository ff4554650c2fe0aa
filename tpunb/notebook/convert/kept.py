"""What of a notebook is written into the run folder: not the cells that are kept out of runs.

The guide recommends such cells for secrets, and to put none into others. Commands are the exception
that people forget: `%%tpu_train --env TOKEN=…`, `!git clone https://TOKEN@…`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from tpunb.notebook.convert.cells import SKIP_LINE, SKIP_TAGS
from tpunb.notebook.convert.secrets import without_secrets
from tpunb.notebook.models import Snapshot

NOT_KEPT = f"{SKIP_LINE}\n# (not kept)"


def is_skipped(source: str, tags: Iterable[str]) -> bool:
    """Whether a cell is marked as one for the notebook alone."""
    first = source.lstrip().partition("\n")[0].strip()
    return first == SKIP_LINE or bool(SKIP_TAGS.keys() & set(tags))


def kept_source(source: str, tags: Iterable[str] = ()) -> str:
    """The text of a code cell as it is written down, line for line unless the cell is skipped."""
    if is_skipped(source, tags):
        return NOT_KEPT
    lines = source.split("\n")
    return "\n".join(
        without_secrets(line) if line.lstrip().startswith(("%", "!")) else line for line in lines
    )


def kept_snapshot(snapshot: Snapshot) -> Snapshot:
    """For `notebook.json`."""
    cells = tuple(
        replace(cell, source=kept_source(cell.source, cell.tags)) if cell.kind == "code" else cell
        for cell in snapshot.cells
    )
    left_out = tuple(
        (replace(cell, source=kept_source(cell.source, cell.tags)), why)
        for cell, why in snapshot.left_out
    )
    return replace(snapshot, cells=cells, left_out=left_out, content=None)


def kept_notebook(text: str) -> str:
    """For `notebook.ipynb`: the same text if there is nothing to leave out. Raises ValueError."""
    notebook = json.loads(text)
    changed = False
    for cell in notebook.get("cells", ()):
        if cell.get("cell_type") != "code":
            continue
        source = "".join(cell.get("source", ""))
        tags = cell.get("metadata", {}).get("tags", ())
        kept = kept_source(source, tags)
        if kept != source:
            cell["source"] = kept.splitlines(keepends=True)
            changed = True
            if is_skipped(source, tags):
                cell["outputs"] = []
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" if changed else text
