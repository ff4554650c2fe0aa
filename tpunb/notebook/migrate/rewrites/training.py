"""Converts a notebook to one for `%%tpu_train`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tpunb.notebook.lint.index import NotebookIndex, makers
from tpunb.notebook.lint.not_returned import find_not_returned
from tpunb.notebook.migrate.report import LOAD, Change, source_like, text_of
from tpunb.notebook.models import Cell, Snapshot
from tpunb.notebook.parsing import parse_cells
from tpunb.notebook.scopes import Site, bound_names, first_line

STARTERS = ("launch", "spawn", "notebook_launcher")
"""The last names of `torch_xla.launch`, `xmp.spawn` and accelerate's `notebook_launcher`."""
MODULES = ("torch_xla", "xmp", "xla_multiprocessing", "mp", "multiprocessing")
"""The last names of the modules in which `launch` and `spawn` start ranks."""
TRAIN = "%%tpu_train\n"
ON_ONE_CORE = "%%tpu_train --cores 1\n"
NO_PLACE = (
    "no cell calls torch_xla.launch, xmp.spawn or notebook_launcher: put %%tpu_train at the top of "
    "the cell that trains"
)
NOT_ALONE = (
    "trains with {}, which does not average the gradients of several cores by itself: see "
    "docs/frameworks.md, then put %%tpu_train at the top of this cell"
)
MADE_ABOVE = (
    "move it into the train cell: above it, it uses the XLA device, and every rank has to run the "
    "cells above again"
)
MOVED = "moved into the train cell: above it, every rank would have to run the cells above again"
NOT_RETURNABLE = (
    "`{}` trains in the ranks: do this in the train cell, or return the model and use that here"
)
APART = "moved to a separate cell: later cells need it, and names of a train cell end with its run"


@dataclass
class Plan:
    """The train cells of a notebook, and what has to be done for them."""

    starts: dict[int, set[int]] = field(default_factory=dict)
    """The statements that start ranks, or train with a framework, by cell."""
    single: dict[int, list[bool]] = field(default_factory=dict)
    """Whether each launcher in a cell starts a single process, by cell."""
    makers: list[tuple[int, int, int]] = field(default_factory=list)
    """Statements that make trainers in other cells: the cell, the statement, the train cell."""
    left: list[Change] = field(default_factory=list)
    """What is to be done by hand."""


def make_training(notebook: dict[str, Any]) -> tuple[list[Change], frozenset[int]]:
    """Put `%load_ext tpunb` at the top and `%%tpu_train` over the cells that start ranks.

    If later cells read names that such a cell assigns before it starts ranks, that part becomes a
    separate cell above it. Returns the changes and the indices of the added cells.
    """
    old = list(notebook["cells"])
    codes = [index for index, cell in enumerate(old) if cell.get("cell_type") == "code"]
    index = _index(old)
    trees = {cell.index: cell.tree.body for cell in index.cells}
    plan = _launches(index)
    if not plan.starts:
        plan = _fits(index)
    index.close()
    moved = _move_makers(old, trees, plan)
    changes = []
    above: dict[int, list[dict[str, Any]]] = {}
    for at in sorted(plan.starts):
        cell, body, start = old[at], trees[at], min(plan.starts[at])
        text = text_of(cell)
        if text.lstrip().startswith(("%%tpu_train", "%%tpu_debug")):
            continue
        later = (part for place, others in trees.items() if place > at for part in others)
        if _bound(body[:start]) & _read(later) and not text.lstrip().startswith("%%"):
            cut = first_line(body[start]) - 1
            lines = text.split("\n")
            while lines[cut - 1].startswith("#") and cut > (body[start - 1].end_lineno or 0):
                cut -= 1
            above[at] = [_new(cell, "\n".join(lines[:cut]).rstrip(), f"tpunb-{at}")]
            text = "\n".join(lines[cut:])
            changes.append(Change(at, 1, "rewritten", lines[0].strip(), APART))
        text = "\n".join([*(statement for statement, _ in moved.get(at, ())), text])
        changes += [change for _, change in moved.get(at, ())]
        magic = ON_ONE_CORE if all(plan.single.get(at, [False])) else TRAIN
        cell["source"] = source_like(cell, magic + text)
        first = text.lstrip().partition("\n")[0]
        changes.append(Change(at, 1, "rewritten", first, "added above it: %%tpu_train"))
    if codes and not changes and not any("%%tpu_train" in text_of(old[at]) for at in codes):
        first = text_of(old[codes[0]]).lstrip().partition("\n")[0]
        return plan.left or [Change(codes[0], 1, "skipped", first, NO_PLACE)], frozenset()
    changes += plan.left if changes else []
    if changes and not any(LOAD in text_of(old[at]) for at in codes):
        above.setdefault(codes[0], []).insert(0, _new(old[codes[0]], LOAD, "tpunb-load"))
        changes.insert(0, Change(codes[0], 1, "rewritten", "", f"a new cell: {LOAD}"))
    added: set[int] = set()
    cells: list[dict[str, Any]] = []
    for at, cell in enumerate(old):
        for new in above.get(at, ()):
            added.add(len(cells))
            cells.append(new)
        cells.append(cell)
    notebook["cells"] = cells
    if changes:
        originals = [at for at in range(len(cells)) if at not in added]
        changes += _add_returns(cells, {new: at for at, new in enumerate(originals)})
    return changes, frozenset(added)


def _index(cells: list[dict[str, Any]]) -> NotebookIndex:
    code = tuple(
        Cell(index, "code", text_of(cell), number=index + 1)
        for index, cell in enumerate(cells)
        if cell.get("cell_type") == "code"
    )
    return NotebookIndex(parse_cells(Snapshot(code, None, None, "a migration")))


def _launches(notebook: NotebookIndex) -> Plan:
    """The statements that start ranks."""
    plan = Plan()
    for launch in (site for name in STARTERS for site in notebook.called.get(name, ())):
        if isinstance(launch.node, ast.Call) and not _is_other(launch.node.func):
            plan.single.setdefault(launch.cell.index, []).append(notebook.one_process(launch))
            for site in _top_level(notebook, launch, patched=True):
                plan.starts.setdefault(site.cell.index, set()).add(_statement(site))
    return plan


def _fits(notebook: NotebookIndex) -> Plan:
    """The statements that train with a framework, in a notebook without launchers."""
    plan = Plan()
    left: dict[tuple[int, int], Change] = {}
    for fit in (*notebook.fits, *notebook.backward_by_accelerate):
        for site in _top_level(notebook, fit.site):
            at = site.cell.index
            if not fit.framework.reduces:
                what = NOT_ALONE.format(fit.framework.name)
                left[at, site.line] = _left(site, what)
                continue
            plan.starts.setdefault(at, set()).add(_statement(site))
            for maker in makers(notebook, fit):
                if maker.frame.function is None and maker.cell.index == at:
                    plan.starts[at].add(_statement(maker))
                elif maker.frame.function is None:
                    plan.makers.append((maker.cell.index, _statement(maker), at))
    plan.left = list(left.values())
    return plan


def _move_makers(
    cells: list[dict[str, Any]], trees: dict[int, list[ast.stmt]], plan: Plan
) -> dict[int, list[tuple[str, Change]]]:
    """Take the statements that make trainers out of their cells, each with its change, by train
    cell. A statement whose names other cells read stays where it is, and is reported.
    """
    moved: dict[int, list[tuple[str, Change]]] = {}
    gone: dict[int, set[int]] = {}
    for at, number, train in sorted(set(plan.makers)):
        text, node = text_of(cells[at]), trees[at][number]
        lines = text.split("\n")
        first, last = node.lineno, node.end_lineno or node.lineno
        between = (
            part
            for place, body in trees.items()
            for part in body
            if (at, last) < (place, part.lineno) and place < train
        )
        used = _bound([node]) & _read(between)
        shown = lines[first - 1].strip()
        magic = text.lstrip().startswith("%%")
        if at < train and isinstance(node, ast.Assign) and not used and not magic:
            change = Change(at, first, "rewritten", shown, MOVED)
            moved.setdefault(train, []).append(("\n".join(lines[first - 1 : last]), change))
            gone.setdefault(at, set()).update(range(first - 1, last))
        else:
            plan.left.append(Change(at, first, "skipped", shown, MADE_ABOVE))
    for at, taken in gone.items():
        lines = text_of(cells[at]).split("\n")
        if at in plan.starts:  # whose statements are still found by their lines
            kept = ["" if line in taken else text for line, text in enumerate(lines)]
        else:
            kept = [text for line, text in enumerate(lines) if line not in taken]
        cells[at]["source"] = source_like(cells[at], "\n".join(kept))
    return moved


def _add_returns(cells: list[dict[str, Any]], before: dict[int, int]) -> list[Change]:
    """Add `--returns` for what cells below the new train cells use of them.

    `before` has the index that each cell had in the old notebook, unless it was added.
    """
    notebook = _index(cells)
    names: dict[int, set[str]] = {}
    changes = []
    for missing in find_not_returned(notebook):
        if missing.trainer:
            change = _left(missing.site, NOT_RETURNABLE.format(missing.name))
            changes.append(replace(change, cell=before[change.cell]))
        else:
            names.setdefault(missing.train.index, set()).add(missing.name)
    notebook.close()
    for index, own in names.items():
        head, _, rest = text_of(cells[index]).partition("\n")
        given = ",".join(sorted(own))
        if head.startswith("%%tpu_train") and "--returns" not in head:
            cells[index]["source"] = source_like(cells[index], f"{head} --returns {given}\n{rest}")
            what = f"added --returns {given}: cells below use it"
            changes.append(Change(before[index], 1, "rewritten", head, what))
    return changes


def _is_other(function: ast.expr) -> bool:
    """Whether `launch` or `spawn` belongs to something else: `subprocess.launch(…)`."""
    if not isinstance(function, ast.Attribute) or function.attr == "notebook_launcher":
        return False
    root = function.value
    return (root.id if isinstance(root, ast.Name) else getattr(root, "attr", "")) not in MODULES


def _left(site: Site, what: str) -> Change:
    shown = site.cell.lines[site.line - 1].strip()
    return Change(site.cell.index, site.line, "skipped", shown, what)


def _statement(site: Site) -> int:
    """The number of the top-level statement that contains a site."""
    place = site.line, site.node.col_offset  # type: ignore[attr-defined]
    starts = [(first_line(part), part.col_offset) for part in site.cell.tree.body]
    return max(number for number, start in enumerate(starts) if start <= place)


def _bound(body: list[ast.stmt]) -> set[str]:
    return bound_names(ast.Module(body, []))


def _read(body: Iterable[ast.stmt]) -> set[str]:
    names = (node for part in body for node in ast.walk(part) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


def _new(model: dict[str, Any], text: str, name: str) -> dict[str, Any]:
    """A new code cell, with an id if the notebook's cells have ids."""
    identity = {"id": name} if "id" in model else {}
    return {
        "cell_type": "code",
        "execution_count": None,
        **identity,
        "metadata": {},
        "outputs": [],
        "source": source_like(model, text),
    }


def _top_level(
    notebook: NotebookIndex, site: Site, depth: int = 4, *, patched: bool = False
) -> Iterator[Site]:
    """Yield the top-level sites that lead to a site: itself, or calls of its function.

    With `patched` a function may also be called as a method, as fastai's `@patch` makes it one.
    """
    function = site.frame.function
    if function is None:
        yield site
    elif depth and function.name:
        for caller in notebook.called.get(function.name, ()):
            if patched or function in notebook.targets(caller):
                yield from _top_level(notebook, caller, depth - 1, patched=patched)
