"""Rewrite a notebook of an older torch_xla for the current one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import nbformat
from nbformat import v4

from tpunb.notebook.errors import NotebookError
from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.migrate.imports import NotebookImports
from tpunb.notebook.migrate.names import NotebookNames
from tpunb.notebook.migrate.report import Change, Migration, source_like, text_of
from tpunb.notebook.migrate.rewrites.calls import CallRewriter
from tpunb.notebook.migrate.rewrites.data_parallel import DataParallelRewriter
from tpunb.notebook.migrate.rewrites.loaders import LoaderRewriter
from tpunb.notebook.migrate.rewrites.setup import SetupRewriter
from tpunb.notebook.migrate.rewrites.training import make_training
from tpunb.notebook.migrate.statements import Removals
from tpunb.notebook.migrate.torchtpu.migrator import to_torchtpu


def migrate(
    notebook: Mapping[str, Any], *, train: bool = False, to: Literal["xla", "torchtpu"] = "xla"
) -> Migration:
    """Rewrite a notebook from removed torch_xla names to those of torch_xla 2.9, or for TorchTPU.

    `notebook` is the content of an ipynb file of format 4, as a dict or nbformat node; it is not
    changed. Only sources of code cells differ in the result; a source remains a string or a list
    of lines. Code that cannot be rewritten safely gets a comment `# tpunb migrate: …` above it. A
    cell that is not Python is left unchanged and reported. A second migration changes nothing.

    With `train` the result is a notebook for `%%tpu_train`: tpunb is loaded in a cell at the top,
    and each cell that starts ranks begins with the magic; the code in it that later cells need
    becomes a cell above it. `to="torchtpu"` does this with every notebook that starts ranks, as
    TorchTPU has no launcher for notebooks; `Migration.left` has the names that are left over.
    Raises NotebookError if this is not a notebook of format 4.
    """
    if not isinstance(notebook.get("cells"), list):
        raise NotebookError(
            "this is not a notebook of format 4 (it has no list of cells). "
            "`jupyter nbconvert --to notebook --nbformat 4 FILE` converts a notebook of an older "
            "format."
        )
    result = copy.deepcopy(dict(notebook))
    if to == "torchtpu":
        return to_torchtpu(notebook, result, train)
    cells = [
        CodeCell(index, text_of(cell))
        for index, cell in enumerate(result["cells"])
        if cell.get("cell_type") == "code"
    ]
    changes = rewrite([cell for cell in cells if not cell.file])
    for cell in cells:
        changes += rewrite([cell]) if cell.file else []
    for cell in cells:
        node = result["cells"][cell.index]
        if (text := cell.result()) != text_of(node):
            node["source"] = source_like(node, text)
    added: frozenset[int] = frozenset()
    if train:
        training, added = make_training(result)
        changes += training
    return Migration(result, tuple(changes), notebook, added)


def migrate_text(
    text: str, *, train: bool = False, to: Literal["xla", "torchtpu"] = "xla"
) -> tuple[str, Migration]:
    """Return the migrated text of a notebook file, and the changes: see `migrate`.

    The text of a notebook that needs no change is returned unchanged; any other is formatted by
    nbformat, as Jupyter does. Raises NotebookError if the text is not JSON or not a notebook of
    format 4.
    """
    try:
        notebook = json.loads(text)
    except ValueError as error:
        raise NotebookError(f"this is not a notebook, because it is not JSON: {error}") from error
    if not isinstance(notebook, dict):
        raise NotebookError("this is not a notebook: the file does not contain a JSON object")
    migration = migrate(notebook, train=train, to=to)
    if migration.changed:
        # Skips nbformat's validation, which migrated notebooks of 2019 may not pass.
        text = v4.writes(nbformat.from_dict(migration.notebook)) + "\n"
    return text, migration


def rewrite(cells: Sequence[CodeCell]) -> list[Change]:
    """Edit cells that form one program; return the changes, in order."""
    names = NotebookNames(cells)
    removals = Removals(names)
    setup = SetupRewriter(names, removals)
    setup.apply()
    imports = NotebookImports(names, removals)
    setup.spmd(imports)
    loaders, data_parallel = LoaderRewriter(imports), DataParallelRewriter(imports)
    loaders.apply()
    data_parallel.apply()
    CallRewriter(imports, loaders.handled | data_parallel.handled).apply()
    setup.strings()
    for cell in cells:
        if cell.shell:
            setup.script(cell)
    imports.remove_gone()
    removals.apply()
    unread = "\n".join(cell.text for cell in cells if not cell.python)
    imports.drop_unused(unread)
    return [
        change for cell in cells for change in sorted(cell.changes, key=lambda entry: entry.line)
    ]
