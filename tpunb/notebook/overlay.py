"""What was executed, laid over the document.

Neither alone is the notebook: unsaved edits are not in the file, and cells that never ran,
tags and the order of cells are nowhere else. The rules are those of `tpunb.notebook.capture`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpunb.models import Cell, Snapshot
from tpunb.notebook.differences import DELETED, FAILED, NEVER, Differences
from tpunb.notebook.history import Execution
from tpunb.notebook.identity import Key, identify


def overlay(
    document: tuple[Cell, ...],
    executed: Sequence[Execution],
    *,
    saved: float = 0.0,
    deleted: Mapping[str, float] | None = None,
) -> Snapshot:
    """Lay executions over a document (empty: there is none). The last one is the train cell.

    `saved` says since when the document is as it is, in seconds since the epoch; infinity: it
    is what the front end holds now. `deleted` is `History.deleted()`. Path and origin are left
    to the caller.
    """
    keys = identify(document, executed, saved)
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
    ids = {cell.id for cell in document if cell.id}
    known = any(run.id in ids for run in executed)  # VS Code's ids are not those of the file

    cells: list[Cell] = []
    left_out: list[tuple[Cell, str]] = []
    notes = Differences(saved, deleted or {})
    for place, key in enumerate(order):
        cell = document[key] if isinstance(key, int) else None
        run = last.get(key)
        if cell is None and run is not None:
            made = Cell(len(cells), "code", run.source, run.number, run.id)
            if key == train:
                cells.append(made)
            elif run.failed and (not document or run.id is None):
                # What is known of it is that it cannot be repeated.
                left_out.append((made, FAILED))
            elif known and run.id is not None and saved > run.time:
                left_out.append((made, DELETED))
            else:
                cells.append(made)
                notes.ran(made, None, run)
        elif cell is not None and run is not None:
            ran = replace(cell, kind="code", source=run.source, number=run.number)
            cells.append(replace(ran, index=len(cells)))
            if place < at:
                notes.ran(cells[-1], cell, run)
        elif cell is not None and cell.kind == "code" and place < at:
            left_out.append((replace(cell, index=len(cells), number=None), NEVER))
        elif cell is not None:
            cells.append(replace(cell, index=len(cells), number=None))
        if key == train:
            train_index = len(cells) - 1
    laid = Snapshot(tuple(cells), train_index, None, "executed cells", left_out=tuple(left_out))
    if document and isinstance(train, str):
        before = next((last[key] for key in reversed(order[:at]) if key in last), None)
        notes.without_a_place(before)
    return replace(laid, notes=notes.lines(laid))


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
