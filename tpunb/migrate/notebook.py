"""`migrate`: a notebook of an older torch_xla, rewritten for the current one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from tpunb.errors import NotebookError
from tpunb.migrate.calls import Calls
from tpunb.migrate.cells import CodeCell
from tpunb.migrate.changes import Change, Migration, text_of
from tpunb.migrate.imports import Imports
from tpunb.migrate.loaders import Loaders
from tpunb.migrate.names import Names
from tpunb.migrate.replicas import Replicas
from tpunb.migrate.setup import Setup
from tpunb.migrate.statements import Retirements
from tpunb.migrate.training import make_training


def migrate(notebook: Mapping[str, Any], *, train: bool = False) -> Migration:
    """A notebook rewritten from retired torch_xla names to those of torch_xla 2.9.

    `notebook` is the content of an ipynb file of format 4, as a dict or nbformat node; it is not
    changed. Only sources of code cells differ in the result; a source is a string or a list
    of lines as it was. What cannot be rewritten safely gets a comment `# tpunb migrate: …` above
    it. A cell that is not Python is left as it is, and is in the report. The result of a second
    migration is the same.

    With `train` the result is a notebook for `%%tpu_train`: tpunb is loaded in a cell at the
    top, and the magic stands over each cell that starts ranks; what later cells need of such
    a cell becomes a cell above it. Raises NotebookError if this is
    no notebook of format 4.
    """
    if not isinstance(notebook.get("cells"), list):
        raise NotebookError(
            "this is no notebook of format 4 (it has no list of cells). "
            "`jupyter nbconvert --to notebook --nbformat 4 FILE` makes one of an older format."
        )
    result = copy.deepcopy(dict(notebook))
    cells = [
        CodeCell(index, text_of(cell))
        for index, cell in enumerate(result["cells"])
        if cell.get("cell_type") == "code"
    ]
    changes = rewrite([cell for cell in cells if not cell.file])
    for cell in cells:
        changes += rewrite([cell]) if cell.file else []
    for cell in cells:
        _put(result["cells"][cell.index], cell.result())
    added: frozenset[int] = frozenset()
    if train:
        made, added = make_training(result)
        changes += made
    return Migration(result, tuple(changes), notebook, added)


def rewrite(cells: Sequence[CodeCell]) -> list[Change]:
    """Make the edits in cells that are run one after the other; what was done, in order."""
    names = Names(cells)
    retirements = Retirements(names)
    setup = Setup(names, retirements)
    setup.apply()
    imports = Imports(names, retirements)
    setup.spmd(imports)
    loaders = Loaders(names, imports, retirements)
    loaders.apply()
    replicas = Replicas(names, imports, retirements)
    replicas.apply()
    Calls(names, imports, retirements, loaders, replicas).apply()
    setup.strings()
    for cell in cells:
        if cell.shell:
            setup.script(cell)
    retirements.apply()
    unread = "\n".join(cell.text for cell in cells if cell.module is None)
    imports.drop_unused(unread)
    return [change for cell in cells for change in sorted(cell.changes, key=lambda one: one.line)]


def _put(cell: dict[str, Any], text: str) -> None:
    """Set a cell's source in the form that it has."""
    if text == text_of(cell):
        return
    lines = text.split("\n")
    as_list = [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    cell["source"] = text if isinstance(cell["source"], str) else as_list
