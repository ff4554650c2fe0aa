"""Reduce the cells that a sweep executes for each trial of a notebook.

The cells above the train cell run in the processes of the runs, where a kept prelude serves one
trial after another. A trial's kernel runs only those of them that define names which cells below
the train cell use. Parameters are set as late as possible, so that the cells above them are the
same in all trials.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tpunb.notebook.convert.cells import SKIP_TAGS
from tpunb.notebook.convert.syntax import parsed
from tpunb.notebook.files import cell_magics, load_cells
from tpunb.notebook.models import KEPT, Cell, Snapshot
from tpunb.notebook.parsing import parse_cells
from tpunb.notebook.scopes import ParsedCell, Scopes, bound_names, imported
from tpunb.utils import files

INJECTED = "injected-parameters"
_SKIP = "skip-execution"
"""nbclient's tag."""
_WORD = re.compile(r"[^\W\d]\w*")
_EVERYTHING = frozenset("globals locals vars eval exec dir get_ipython __main__ input".split())
"""A cell that uses one of these may use any name."""
_PROCESS = frozenset("environ putenv chdir load_dotenv".split())
"""A cell that uses one of these may change the kernel's process, which runs and later cells
inherit."""
NOTE = (
    "[tpunb] this cell ran in the processes of the run, once for all trials with the same cells "
    "above it; this kernel does not need it\n"
)


def defer_parameters(snapshot: Snapshot) -> Snapshot:
    """Move the injected parameters to right above the first cell that may use one of them.

    The cells in between mention none of their names, so running them earlier changes nothing.
    """
    at = next((c.index for c in snapshot.cells if INJECTED in c.tags), None)
    if at is None or snapshot.train is None or snapshot.train <= at:
        return snapshot
    cells = list(snapshot.cells)
    if (tree := parsed([cells[at].source])) is None:
        return snapshot
    names = bound_names(tree)
    end = at + 1
    while end < snapshot.train and not _mentions(cells[end], names):
        end += 1
    cells.insert(end - 1, cells.pop(at))
    moved = tuple(replace(cell, index=index) for index, cell in enumerate(cells))
    # `left_out` keeps its indices: the order of the cells around left-out cells does not change
    # in a way that matters to them.
    return replace(snapshot, cells=moved)


def with_parameters(snapshot: Snapshot, source: str) -> Snapshot:
    """Insert a cell that assigns parameters, as papermill would.

    It is placed below the last cell above the train cell that assigns one of them, or lower.
    """
    assert snapshot.train is not None
    names = bound_names(ast.parse(source))
    above = [cell for cell in parse_cells(snapshot) if cell.index < snapshot.train]
    assigning = [cell.index for cell in above if bound_names(cell.tree) & names]
    at = max(assigning, default=-1) + 1
    cells = list(snapshot.cells)
    cells.insert(at, Cell(at, "code", source, tags=(INJECTED,)))
    moved = tuple(replace(cell, index=index) for index, cell in enumerate(cells))
    return defer_parameters(replace(snapshot, cells=moved, train=snapshot.train + 1))


def _mentions(cell: Cell, names: set[str]) -> bool:
    if cell.kind != "code":
        return False
    words = set(_WORD.findall(cell.source))
    unclear = bool(words & _EVERYTHING) or "import *" in cell.source
    return unclear or bool(words & names) or cell.source.lstrip().startswith("%%")


def for_trials(text: str, path: str) -> str:
    """Tag the cells of a notebook, given as JSON text, that the kernels of trials do not run."""
    notebook = json.loads(text)
    kept = _only_for_runs(load_cells(path))
    for index in kept:
        tags = notebook["cells"][index].setdefault("metadata", {}).setdefault("tags", [])
        tags += [KEPT, _SKIP]
    return json.dumps(notebook, indent=1)


def _only_for_runs(cells: tuple[Cell, ...]) -> set[int]:
    """Cells above the first train cell whose names no cell below it needs in the kernel."""
    trains = [c.index for c in cells if c.kind == "code" and "tpu_train" in cell_magics(c.source)]
    if not trains:
        return set()
    needed: set[str] = set()
    for cell in cells[trains[0] :]:
        if cell.kind == "code":
            # In a train cell only the option line counts: IPython fills in names there.
            own = cell.source.partition("\n")[0] if cell.index in trains else cell.source
            needed |= set(_WORD.findall(own))
    if needed & _EVERYTHING:
        return set()
    parsed = {c.index: c for c in parse_cells(Snapshot(cells, trains[0], None, "the file"))}
    modules = _imported(parsed.values())
    kept: set[int] = set()
    for cell in reversed(cells[: trains[0]]):
        if cell.kind != "code":
            continue
        words = set(_WORD.findall(cell.source))
        if cell.index in parsed and _is_plain(parsed[cell.index], cell, words):
            tree = parsed[cell.index].tree
            used = words - modules
            if not needed & (bound_names(tree) | used):
                kept.add(cell.index)
                continue
        needed |= words
    return kept


def _is_plain(parsed: ParsedCell, cell: Cell, words: set[str]) -> bool:
    """True if the cell is pure Python and part of the run."""
    tagged = {"parameters", INJECTED, *SKIP_TAGS} & set(cell.tags)
    whole = parsed.runs and parsed.problem is None and not parsed.left_out
    if words & (_EVERYTHING | _PROCESS) or {"sys", "path"} <= words:
        return False
    return whole and bool(parsed.tree.body) and not tagged


def _imported(cells: Iterable[ParsedCell]) -> set[str]:
    """Names of imported modules: using a module does not change it."""
    imports = (site.node for site in Scopes(cells).imports)
    return {name for node in imports if isinstance(node, ast.Import) for name, _ in imported(node)}


def note_kept(path: Path) -> None:
    """Write into an executed notebook why some of its cells have no output."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if KEPT in cell.get("metadata", {}).get("tags", ()):
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [NOTE]}]
    files.atomic_write(path, json.dumps(notebook, indent=1).encode("utf-8", "replace"))
