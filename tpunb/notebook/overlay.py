"""What was executed, laid over the document.

Neither alone is the notebook: unsaved edits are not in the file, and cells that never ran,
tags and the order of cells are nowhere else. The rules are those of `tpunb.notebook.capture`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from tpunb.models import Cell, Snapshot
from tpunb.notebook.files import cell_magics
from tpunb.notebook.history import Execution

Key = int | str
"""A cell of the document, by its index; or a cell that is not in it, by a name of ours."""

ALIKE = 0.6
"""How much two texts must agree to count as versions of one cell (difflib's ratio)."""


NEVER = "it never ran in this kernel"
FAILED = "it failed"


def overlay(document: tuple[Cell, ...], executed: Sequence[Execution]) -> Snapshot:
    """Lay executions over a document (empty: there is none). The last one is the train cell.

    Path and origin are left to the caller.
    """
    notes = []
    keys = _identify(document, executed)
    last: dict[Key, Execution] = {}
    for key, one in zip(keys, executed, strict=True):
        # Without a document a version that worked stands for one that failed after it.
        if key is not None and not (one.failed and not document and key in last):
            last[key] = one
    train = keys[-1]
    if train is None:
        raise AssertionError("the cell that is running is not an older version of another")
    order = _place(document, keys, train)
    at = order.index(train)
    if document and isinstance(train, str):
        before = next((last[key] for key in reversed(order[:at]) if key in last), None)
        where = "first" if before is None else f"after [{before.number}], which ran before it"
        notes.append(f"the train cell is not in the file yet: it is taken to stand {where}")

    cells: list[Cell] = []
    left_out: list[tuple[Cell, str]] = []
    differing: list[Execution] = []
    for place, key in enumerate(order):
        cell = document[key] if isinstance(key, int) else None
        run = last.get(key)
        if cell is None and run is not None:
            made = Cell(len(cells), "code", run.source, run.number, run.id)
            # Without a document nothing but what ran is known, and this cannot run again.
            if run.failed and not document and key != train:
                left_out.append((made, FAILED))
            else:
                cells.append(made)
        elif cell is not None and run is not None:
            # The train cell was just sent; papermill replaces the cell it injected before.
            expected = key == train or "injected-parameters" in cell.tags
            if not expected and run.source.rstrip() != cell.source.rstrip():
                differing.append(run)
            ran = replace(cell, kind="code", source=run.source, number=run.number)
            cells.append(replace(ran, index=len(cells)))
        elif cell is not None and cell.kind == "code" and place < at:
            left_out.append((replace(cell, index=len(cells), number=None), NEVER))
        elif cell is not None:
            cells.append(replace(cell, index=len(cells), number=None))
        if key == train:
            train_index = len(cells) - 1
    laid = Snapshot(tuple(cells), train_index, None, "executed cells", (), tuple(left_out))
    never = [
        f"{laid.called(cell)} ({_title(cell)})"
        for cell, reason in left_out
        if reason == NEVER and cell.source.strip() and not _own(cell.source)
    ]
    failed = [cell for cell, reason in left_out if reason == FAILED and not _own(cell.source)]
    if failed:
        notes.append(f"{_numbers(failed)} failed and cannot be repeated: left out")
    if never:
        notes.append(f"never ran in this kernel, so left out: {_listed(never)}")
    if differing:
        notes.append(
            f"the file has another text for {_numbers(differing)}: the text that ran is used"
        )
    return replace(laid, notes=tuple(notes))


def _identify(document: tuple[Cell, ...], executed: Sequence[Execution]) -> list[Key | None]:
    """For each execution the cell that it was of; None: an older version of a cell."""
    by_id = {cell.id: cell.index for cell in document if cell.id}
    # A file of nbformat 4.4 or older holds no ids, whatever the front end sends.
    ids = any(run.id in by_id for run in executed)
    keys: list[Key | None] = []
    for run in executed:
        known = by_id.get(run.id or "")
        keys.append(run.id if known is None and (ids or not document) else known)
    _match_equal(document, executed, keys)
    same: dict[str | None, Key] = {
        run.id: key for run, key in zip(executed, keys, strict=True) if run.id and key is not None
    }
    keys = [same.get(run.id, key) for run, key in zip(executed, keys, strict=True)]
    for index, key in enumerate(keys):
        if key is None:
            keys[index] = _match_alike(document, executed, keys, index, older=ids)
    return keys


def _match_equal(
    document: tuple[Cell, ...], executed: Sequence[Execution], keys: list[Key | None]
) -> None:
    """Give executions without a key the document cell of equal text, in order."""
    places: dict[str, list[int]] = {}
    for cell in document:
        if cell.kind == "code":
            places.setdefault(cell.source.rstrip(), []).append(cell.index)
    claimed: set[int] = set()
    at = -1
    for index, run in enumerate(executed):
        if keys[index] is not None:
            continue
        equal = places.get(run.source.rstrip(), [])
        if equal:
            # The next one that has not run; else one above; else the cell ran again.
            free = [place for place in equal if place not in claimed]
            at = next((place for place in free if place > at), (free or equal)[0])
            claimed.add(at)
            keys[index] = at


def _match_alike(
    document: tuple[Cell, ...],
    executed: Sequence[Execution],
    keys: list[Key | None],
    index: int,
    older: bool,
) -> Key | None:
    """The cell of an execution whose text is not in the document.

    It is a cell that was edited since, if an alike one between its neighbours has not run.
    With `older` (executions before the hook, in a front end with ids) it is an older version
    of a cell, None, if an alike one ran later. Else it is a cell of its own.
    """
    run = executed[index]
    own = run.id or f"execution {index}"
    above = next((key for key in reversed(keys[:index]) if isinstance(key, int)), -1)
    below = next((key for key in keys[index + 1 :] if isinstance(key, int)), len(document))
    below = below if below > above else len(document)
    ran = set(keys)
    for cell in document[above + 1 : below]:
        if cell.kind == "code" and cell.index not in ran and _alike(run.source, cell.source):
            return cell.index
    if older and run.id is None and index < len(executed) - 1:
        for later, key in zip(executed[index + 1 :], keys[index + 1 :], strict=True):
            if isinstance(key, int) and _alike(run.source, later.source):
                return None
    return own


def _place(document: tuple[Cell, ...], keys: Sequence[Key | None], train: Key) -> list[Key]:
    """All cells in order: cells that are not in the document stand after the cell that ran
    before their first execution; a train cell that is not, before its last one.
    """
    order: list[Key] = [cell.index for cell in document]
    previous: Key | None = None
    for key in keys:
        if key is None or key == train:
            continue
        if isinstance(key, str) and key not in order:
            _insert(order, key, previous)
        previous = key
    if train not in order:
        _insert(order, train, previous)
    return order


def _insert(order: list[Key], key: Key, previous: Key | None) -> None:
    at = 0 if previous is None else order.index(previous) + 1
    while at < len(order) and isinstance(order[at], str):  # new cells keep the order they ran in
        at += 1
    order.insert(at, key)


def _alike(text: str, other: str) -> bool:
    match = difflib.SequenceMatcher(None, text, other)
    return match.real_quick_ratio() >= ALIKE and match.quick_ratio() >= ALIKE <= match.ratio()


def _own(source: str) -> bool:
    """Whether it is a cell of tpunb's own magics, which no run repeats."""
    return any(name.startswith("tpu_") for name in cell_magics(source))


def _title(cell: Cell) -> str:
    line = cell.source.strip().splitlines()[0]
    return line if len(line) <= 40 else f"{line[:39]}…"


def _numbers(runs: Sequence[Execution | Cell]) -> str:
    return "cell " + _listed([f"[{run.number}]" for run in runs])


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
