"""Converts a notebook to one for `%%tpu_train`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from tpunb.notebook.convert.statements import read_anywhere
from tpunb.notebook.lint.index import NotebookIndex, makers
from tpunb.notebook.lint.names import last_part
from tpunb.notebook.lint.not_returned import find_not_returned
from tpunb.notebook.lint.walk import Site, parse_cells
from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.migrate.report import LOAD, Change, source_like, text_of
from tpunb.notebook.models import Cell, Snapshot

STARTERS = frozenset(("launch", "spawn", "notebook_launcher"))
"""The last names of `torch_xla.launch`, `xmp.spawn` and accelerate's `notebook_launcher`."""
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


def make_training(notebook: dict[str, Any]) -> tuple[list[Change], frozenset[int]]:
    """Put `%load_ext tpunb` at the top and `%%tpu_train` over the cells that start ranks.

    If later cells read names that such a cell assigns before it starts ranks, that part becomes a
    separate cell above it. Returns the changes and the indices of the added cells.
    """
    old = list(notebook["cells"])
    codes = [index for index, cell in enumerate(old) if cell.get("cell_type") == "code"]
    trees = _trees(old, codes)
    starters = _functions(list(trees.values()))
    changes = []
    above: dict[int, list[dict[str, Any]]] = {}
    places = {
        index: [number for number, part in enumerate(tree.body) if _calls([part], starters)]
        for index, tree in trees.items()
    }
    left: list[Change] = []
    moved: dict[int, list[tuple[str, Change]]] = {}
    makers_here: dict[int, set[int]] = {}
    if not any(places.values()):
        places, left, makers_here, wanted = _fits(old, trees)
        moved = _move_makers(old, trees, wanted, left)
    for index, starts in places.items():
        tree, cell = trees[index], old[index]
        text = text_of(cell)
        if not starts or text.lstrip().startswith(("%%tpu_train", "%%tpu_debug")):
            continue
        starts = _with_makers(tree, starts, makers_here.get(index, set()))
        head = tree.body[: starts[0]]
        others = [other for place, other in trees.items() if place > index]
        read = set[str]().union(*map(read_anywhere, others))
        if _bound(head) & read and not text.lstrip().startswith("%%"):
            cut = _line(tree.body[starts[0]])
            lines = text.split("\n")
            while lines[cut - 1].startswith("#") and cut - 1 > _end(head):
                cut -= 1
            above[index] = [_new(cell, "\n".join(lines[:cut]).rstrip(), f"tpunb-{index}")]
            text = "\n".join(lines[cut:])
            changes.append(Change(index, 1, "rewritten", lines[0].strip(), APART))
        if index in moved:
            text = "\n".join([*(statement for statement, _ in moved[index]), text])
            changes += [change for _, change in moved[index]]
        calls = _starting(tree)
        alone = bool(calls) and all(map(_is_single, calls))
        cell["source"] = source_like(cell, (ON_ONE_CORE if alone else TRAIN) + text)
        first = text.lstrip().partition("\n")[0]
        changes.append(Change(index, 1, "rewritten", first, "added above it: %%tpu_train"))
    if codes and not changes and not any("%%tpu_train" in text_of(old[at]) for at in codes):
        first = text_of(old[codes[0]]).lstrip().partition("\n")[0]
        return left or [Change(codes[0], 1, "skipped", first, NO_PLACE)], frozenset()
    changes += left if changes else []
    if changes and not any(LOAD in text_of(old[index]) for index in codes):
        above.setdefault(codes[0], []).insert(0, _new(old[codes[0]], LOAD, "tpunb-load"))
        changes.insert(0, Change(codes[0], 1, "rewritten", "", f"a new cell: {LOAD}"))
    added: set[int] = set()
    cells: list[dict[str, Any]] = []
    for index, cell in enumerate(old):
        for new in above.get(index, ()):
            added.add(len(cells))
            cells.append(new)
        cells.append(cell)
    notebook["cells"] = cells
    if changes:
        originals = [at for at in range(len(cells)) if at not in added]
        changes += _add_returns(cells, {new: at for at, new in enumerate(originals)})
    return changes, frozenset(added)


def _trees(cells: list[dict[str, Any]], codes: list[int]) -> dict[int, ast.Module]:
    parsed = (CodeCell(index, text_of(cells[index])) for index in codes)
    return {cell.index: cell.tree for cell in parsed if cell.python and not cell.file}


Maker = tuple[int, int, int]
"""A trainer that is made in another cell than it trains in: that cell, the line, the train cell."""


def _fits(
    cells: list[dict[str, Any]], trees: dict[int, ast.Module]
) -> tuple[dict[int, list[int]], list[Change], dict[int, set[int]], list[Maker]]:
    """For notebooks without launchers: the statements that train with a framework, by cell; what
    is to be done by hand; the lines that make trainers, in these cells and in others.
    """
    code = tuple(Cell(index, "code", text_of(cells[index]), number=index + 1) for index in trees)
    notebook = NotebookIndex(parse_cells(Snapshot(code, None, None, "a migration")))
    places: dict[int, list[int]] = {index: [] for index in trees}
    left: dict[tuple[int, int], Change] = {}
    here: dict[int, set[int]] = {}
    wanted: list[Maker] = []
    for fit in (*notebook.fits, *notebook.backward_by_accelerate):
        for site in _top_level(notebook, fit.site):
            at = site.cell.index
            shown = site.cell.lines[site.line - 1].strip()
            if not fit.framework.reduces:
                what = NOT_ALONE.format(fit.framework.name)
                left[at, site.line] = Change(at, site.line, "skipped", shown, what)
                continue
            body = trees[at].body
            places[at] += [n for n, part in enumerate(body) if part.lineno <= site.line][-1:]
            for maker in makers(notebook, fit):
                if maker.frame.function is None and maker.cell.index == at:
                    here.setdefault(at, set()).add(maker.line)
                elif maker.frame.function is None:
                    wanted.append((maker.cell.index, maker.line, at))
    notebook.close()
    starts = {index: sorted(numbers) for index, numbers in places.items()}
    return starts, list(left.values()), here, list(dict.fromkeys(wanted))


def _with_makers(tree: ast.Module, starts: list[int], lines: set[int]) -> list[int]:
    """Begin with the statement that makes the trainer, which stays in the train cell."""
    made = [
        number
        for number, part in enumerate(tree.body)
        if any(part.lineno <= line <= (part.end_lineno or part.lineno) for line in lines)
    ]
    return sorted({*starts, *made})


def _move_makers(
    cells: list[dict[str, Any]],
    trees: dict[int, ast.Module],
    wanted: list[Maker],
    left: list[Change],
) -> dict[int, list[tuple[str, Change]]]:
    """Take the statements that make trainers out of their cells, each with its change, by train
    cell. A statement whose names other cells read stays where it is, and is added to `left`.
    """
    moved: dict[int, list[tuple[str, Change]]] = {}
    gone: dict[int, set[int]] = {}
    for index, line, train in sorted(wanted):
        text = text_of(cells[index])
        lines = text.split("\n")
        node = next(n for n in trees[index].body if n.lineno <= line <= (n.end_lineno or 0))
        first, last = node.lineno, node.end_lineno or node.lineno
        names = _bound([node])
        between = [
            part
            for place, tree in trees.items()
            for part in tree.body
            if (index, last) < (place, part.lineno) and place < train
        ]
        read = set[str]().union(*map(read_anywhere, between))
        magic = text.lstrip().startswith("%%")
        if index < train and isinstance(node, ast.Assign) and not names & read and not magic:
            statement = "\n".join(lines[first - 1 : last])
            change = Change(index, first, "rewritten", lines[first - 1].strip(), MOVED)
            moved.setdefault(train, []).append((statement, change))
            gone.setdefault(index, set()).update(range(first - 1, last))
        else:
            shown = lines[line - 1].strip()
            left.append(Change(index, line, "skipped", shown, MADE_ABOVE))
    trains = {train for *_, train in wanted}
    for index, taken in gone.items():
        lines = text_of(cells[index]).split("\n")
        if index in trains:  # whose statements are still found by their lines
            kept = ["" if at in taken else line for at, line in enumerate(lines)]
        else:
            kept = [line for at, line in enumerate(lines) if at not in taken]
        cells[index]["source"] = source_like(cells[index], "\n".join(kept))
    return moved


def _add_returns(cells: list[dict[str, Any]], before: dict[int, int]) -> list[Change]:
    """Add `--returns` for what cells below the new train cells use of them.

    `before` has the index that each cell had in the old notebook, unless it was added.
    """
    code = tuple(
        Cell(index, "code", text_of(cell), number=index + 1)
        for index, cell in enumerate(cells)
        if cell.get("cell_type") == "code"
    )
    notebook = NotebookIndex(parse_cells(Snapshot(code, None, None, "a migration")))
    names: dict[int, list[str]] = {}
    changes = []
    for missing in find_not_returned(notebook):
        site = missing.site
        shown = site.cell.lines[site.line - 1].strip()
        if missing.trainer:
            what = NOT_RETURNABLE.format(missing.name)
            changes.append(Change(before[site.cell.index], site.line, "skipped", shown, what))
        else:
            names.setdefault(missing.train.index, []).append(missing.name)
    notebook.close()
    for index, own in names.items():
        text = text_of(cells[index])
        head, _, rest = text.partition("\n")
        given = ",".join(sorted(set(own)))
        if head.startswith("%%tpu_train") and "--returns" not in head:
            cells[index]["source"] = source_like(cells[index], f"{head} --returns {given}\n{rest}")
            what = f"added --returns {given}: cells below use it"
            changes.append(Change(before[index], 1, "rewritten", head, what))
    return changes


def _functions(trees: list[ast.Module]) -> frozenset[str]:
    """The names of functions that start ranks, including the notebook's own."""
    names = set(STARTERS)
    functions = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    grown = True
    while grown:
        grown = False
        for function in functions:
            if function.name not in names and _calls(function.body, frozenset(names)):
                names.add(function.name)
                grown = True
    return frozenset(names)


def _calls(body: list[ast.stmt], names: frozenset[str]) -> bool:
    """Whether statements call one of these names, except in functions that they define."""
    nodes: list[ast.AST] = list(body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            if name in names and not _is_other(function):
                return True
        nodes += ast.iter_child_nodes(node)
    return False


def _starting(tree: ast.Module) -> list[ast.Call]:
    """The calls of launchers in a cell."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and last_part(node.func) in STARTERS
        and not _is_other(node.func)
    ]


def _is_single(call: ast.Call) -> bool:
    """Whether a launcher is called for one process: `nprocs=1`, or its rewritten form."""
    return any(
        isinstance(word.value, ast.Constant)
        and word.arg in ("nprocs", "num_processes", "debug_single_process")
        and word.value.value == 1  # or True
        for word in call.keywords
    )


def _is_other(function: ast.expr) -> bool:
    """Whether `launch` or `spawn` belongs to something else: `subprocess.launch(…)`."""
    if not isinstance(function, ast.Attribute) or function.attr not in ("launch", "spawn"):
        return False
    root = function.value
    name = root.id if isinstance(root, ast.Name) else getattr(root, "attr", "")
    return name not in ("torch_xla", "xmp", "xla_multiprocessing", "mp", "multiprocessing")


def _bound(body: list[ast.stmt]) -> set[str]:
    """The names that statements bind, including those inside functions."""
    names = set()
    for node in (node for part in body for node in ast.walk(part)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def _line(statement: ast.stmt) -> int:
    """The line (from 0) on which a statement starts, including its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def _end(body: list[ast.stmt]) -> int:
    """The line (from 0) on which statements end."""
    return (body[-1].end_lineno or 0) - 1 if body else -1


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


def _top_level(notebook: NotebookIndex, site: Site, depth: int = 4) -> Iterator[Site]:
    """Yield the top-level sites that lead to a site: itself, or calls of its function."""
    function = site.frame.function
    if function is None:
        yield site
    elif depth and function.name:
        for caller in notebook.called.get(function.name, ()):
            if function in notebook.targets(caller):
                yield from _top_level(notebook, caller, depth - 1)
