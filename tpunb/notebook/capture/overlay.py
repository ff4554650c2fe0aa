"""Lay the executions over the document, and note the differences.

Neither alone is the notebook: the file lacks unsaved edits; the history lacks cells that never ran,
tags and the order of cells. An execution is matched to its cell by the front end's id if it sends
one, otherwise by text. The rules are in `tpunb.notebook.capture.capture`.
"""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpunb.notebook.capture.history import Execution
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Cell, LeftOut, Snapshot

Key = int | str
"""The index of a cell in the document, or a name for a cell that is not in it."""

PARAMETERS, INJECTED = "parameters", "injected-parameters"
"""Papermill's tags: for the cell with defaults, and for the cell that it inserts below."""
ALIKE = 0.6
"""Minimum similarity (difflib's ratio) of two texts that count as versions of one cell."""
SHORT = 400
"""Maximum number of characters of texts compared by character, which is slow for long texts."""
NEAR = 20
"""Number of nearest cells that are compared with a text that is not in the document."""
MOST_NAMED = 5
"""Maximum number of cells that a note names."""


def overlay(
    document: tuple[Cell, ...],
    executed: Sequence[Execution],
    *,
    saved: float = 0.0,
    deleted: Mapping[str, float] | None = None,
) -> Snapshot:
    """Lay executions over a document, empty if there is none. The last one is the train cell.

    `saved` is the time of the document's last change, in seconds since the epoch; infinity if it
    is the front end's current state. `deleted` is `History.deleted()`. The caller sets path and
    origin.
    """
    keys = _identify(document, executed, saved)
    last: dict[Key, Execution] = {}
    numbers: dict[Key, list[int]] = {}
    folders: dict[Key, str] = {}
    for key, execution in zip(keys, executed, strict=True):
        # Without a document, a version that worked is preferred to a later one that failed.
        if key is not None and not (execution.failed and not document and key in last):
            last[key] = execution
        # `os.chdir("data")` that was executed once more has failed in the folder that it led to.
        if key is not None and not (execution.failed and folders.get(key)):
            folders[key] = execution.cwd
        if key is not None and execution.number is not None:
            numbers.setdefault(key, []).append(execution.number)
    train = keys[-1]
    if train is None:
        raise AssertionError("the cell that is running is not an older version of another")
    order = _place(document, keys, train)
    at = order.index(train)
    ids = {cell.id for cell in document if cell.id}
    known = any(
        execution.id in ids for execution in executed
    )  # VS Code's ids differ from those of the file

    cells: list[Cell] = []
    left_out: list[tuple[Cell, LeftOut]] = []
    notes = _Notes(saved, deleted or {})
    for place, key in enumerate(order):
        cell = document[key] if isinstance(key, int) else None
        run = last.get(key)
        every, cwd = tuple(numbers.get(key, ())), folders.get(key, "")
        if cell is None and run is not None:
            new = Cell(
                len(cells), "code", run.source, run.number, run.id, (), run.seconds, every, cwd=cwd
            )
            if key == train:
                cells.append(new)
            elif run.failed and (not document or run.id is None):
                # All that is known about it is that it cannot be repeated.
                left_out.append((new, LeftOut.FAILED))
            elif known and run.id is not None and saved > run.time:
                left_out.append((new, LeftOut.DELETED))
            else:
                if isinstance(train, int) and keys.index(key) > keys.index(train):
                    notes.unsaved_cell(run, above=place < at)
                if _is_injected(run, order[place - 1] if place else None, document, executed):
                    new = replace(new, tags=(INJECTED,))
                cells.append(new)
                notes.ran(new, None, run)
        elif cell is not None and run is not None:
            ran = replace(
                cell, kind="code", source=run.source, number=run.number, failed=run.failed, cwd=cwd
            )
            cells.append(replace(ran, index=len(cells), seconds=run.seconds, executions=every))
            if place < at:
                notes.ran(cells[-1], cell, run)
        elif cell is not None and cell.kind == "code" and place < at:
            left_out.append((replace(cell, index=len(cells), number=None), LeftOut.NEVER_RAN))
        elif cell is not None:
            cells.append(replace(cell, index=len(cells), number=None))
        if key == train:
            train_index = len(cells) - 1
    snapshot = Snapshot(tuple(cells), train_index, None, "executed cells", left_out=tuple(left_out))
    if document and isinstance(train, str):
        before = next((last[key] for key in reversed(order[:at]) if key in last), None)
        notes.unsaved_train_cell(before)
    return replace(snapshot, notes=notes.lines(snapshot))


def _is_injected(
    run: Execution, above: Key | None, document: tuple[Cell, ...], executed: Sequence[Execution]
) -> bool:
    """True if a cell that is not in the document was injected by papermill, with parameters.

    Such a cell is below the cell tagged `parameters`, or first if there is none, and assigns
    literals. Programs that run whole notebooks send no ids; an interactive user's cell may just
    be unsaved.
    """
    if not document or any(other.id for other in executed):
        return False
    tagged = [cell.index for cell in document if PARAMETERS in cell.tags]
    if above not in (tagged or (None,)):
        return False
    try:
        body = ast.parse(run.source).body
        for node in body:
            if not isinstance(node, ast.Assign):
                return False
            ast.literal_eval(node.value)
    except (SyntaxError, ValueError, TypeError):
        return False
    return bool(body)


def _place(document: tuple[Cell, ...], keys: Sequence[Key | None], train: Key) -> list[Key]:
    """Return all cells in order.

    A cell that is not in the document is placed after the cell that ran before its first
    execution; a train cell that is not in the document, after the one before its last execution.
    """
    order: list[Key] = [cell.index for cell in document]
    previous: Key | None = None
    for key in keys:
        if key is None or (key == train and train not in order):
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


def _identify(
    document: tuple[Cell, ...], executed: Sequence[Execution], saved: float
) -> list[Key | None]:
    """Return the cell of each execution; None for an older version of a cell."""
    by_id = {cell.id: cell.index for cell in document if cell.id}
    # A file of nbformat 4.4 or older contains no ids, even if the front end sends some.
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
    # Programs that run whole notebooks execute each cell once and send no ids.
    person = saved == math.inf or any(run.id for run in executed)
    for index, key in enumerate(keys):
        if key is None:
            keys[index] = _match_alike(document, executed, keys, index, older=person)
    return keys


def _match_equal(
    document: tuple[Cell, ...], executed: Sequence[Execution], keys: list[Key | None]
) -> None:
    """Match executions without a key to document cells of equal text, in order."""
    places: dict[str, list[int]] = {}
    for cell in document:
        if cell.kind == "code":
            places.setdefault(_stripped(cell.source), []).append(cell.index)
    claimed: set[int] = set()
    at = -1
    for index, run in enumerate(executed):
        if keys[index] is not None:
            continue
        equal = places.get(_stripped(run.source), [])
        if equal:
            # The next cell that has not run; otherwise one above; otherwise the cell ran again.
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
    """Return the cell of an execution whose text is not in the document.

    It is a cell edited since then if a similar cell between its neighbours has not run. With
    `older` (a user executes cells one by one) it is an older version of a cell, None, if a
    similar one ran later. Otherwise it is a cell of its own.
    """
    run = executed[index]
    own = run.id or f"execution {index}"
    above = next((key for key in reversed(keys[:index]) if isinstance(key, int)), -1)
    below = next((key for key in keys[index + 1 :] if isinstance(key, int)), len(document))
    below = below if below > above else len(document)
    ran = set(keys)
    alike = _Alike(run.source)
    free = (c for c in document[above + 1 : below] if c.kind == "code" and c.index not in ran)
    for cell in itertools.islice(free, NEAR):
        if alike(cell.source):
            return cell.index
    if older and run.id is None and index < len(executed) - 1:
        known = (
            later.source
            for later, key in zip(executed[index + 1 :], keys[index + 1 :], strict=True)
            if isinstance(key, int)
        )
        if any(alike(source) for source in itertools.islice(known, NEAR)):
            return None
    return own


class _Alike:
    """Test for versions of one cell's text; compares short texts by character, others by line."""

    def __init__(self, text: str) -> None:
        # Without `autojunk`, which ignores every frequent character of a longer text.
        self._letters = difflib.SequenceMatcher(None, b=text[:SHORT], autojunk=False)
        self._lines = difflib.SequenceMatcher(None, b=_code_lines(text), autojunk=False)
        self._short = len(text) <= SHORT
        self._own = frozenset(_code_lines(text))

    def __call__(self, other: str) -> bool:
        match: difflib.SequenceMatcher[Any]
        if self._short and len(other) <= SHORT:
            match = self._letters
            match.set_seq1(other)
        else:
            match = self._lines
            lines = _code_lines(other)
            if self._own.isdisjoint(lines):
                return False
            match.set_seq1(lines)
        return match.real_quick_ratio() >= ALIKE and match.quick_ratio() >= ALIKE <= match.ratio()


@functools.lru_cache(maxsize=1000)
def _code_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@functools.lru_cache(maxsize=4000)
def _stripped(source: str) -> str:
    """Strip blank lines around a cell's text and white space at line ends."""
    return "\n".join(line.rstrip() for line in source.split("\n")).strip("\n")


class _Notes:
    """Collects notes for the user on differences between the document and the executed cells."""

    def __init__(self, saved: float, deleted: Mapping[str, float]) -> None:
        self._saved = saved
        self._deleted = deleted
        self._edited: list[Cell] = []
        self._moved: list[Cell] = []
        self._lines: list[str] = []

    def unsaved_train_cell(self, before: Execution | None) -> None:
        """Note that the train cell is not in the document; it is placed after `before`."""
        where = "comes first" if before is None else f"follows cell [{before.number}]"
        self._lines.append(f"this cell is not saved yet; assuming it {where}")

    def unsaved_cell(self, run: Execution, *, above: bool) -> None:
        """Note the place of a cell that is not in the document and first ran after the train
        cell, so that its place cannot be known from the order in which the cells ran.
        """
        where = "above" if above else "below"
        self._lines.append(f"cell [{run.number}] is not saved yet; assuming it is {where} this one")

    def ran(self, cell: Cell, document: Cell | None, run: Execution) -> None:
        """Record a prelude cell, as executed and as in the document, to note differences."""
        if _is_tpunb_cell(cell.source):
            return
        if self._deleted.get(cell.id or "", 0.0) > self._saved:
            self._moved.append(cell)
        # Papermill replaces the cell that it injected in an earlier run.
        if document is None or INJECTED in document.tags:
            return
        # The version that ran is the newer one if the cell has only not been saved since.
        if self._saved > run.time and _stripped(document.source) != _stripped(run.source):
            self._edited.append(cell)

    def lines(self, laid: Snapshot) -> tuple[str, ...]:
        """Return the notes, one line for each kind of difference."""
        never, failed, deleted = (
            [
                cell
                for cell, why in laid.left_out
                if why is reason and not _is_tpunb_cell(cell.source) and _has_code(cell.source)
            ]
            for reason in (LeftOut.NEVER_RAN, LeftOut.FAILED, LeftOut.DELETED)
        )
        lines = list(self._lines)
        if never:
            listed = _listed([laid.label(cell) for cell in never])
            lines.append(f"never ran in this kernel, so left out: {listed}")
        for what, cells in (
            ("left out after a failure", failed),
            ("ran and deleted since, so left out", deleted),
            ("deleted or moved since the notebook was saved, still part of this run", self._moved),
        ):
            if cells:
                lines.append(f"{what}: {_named(cells)}")
        if edited := self._edited:
            changed = "was edited after it" if len(edited) == 1 else "were edited after they"
            used = "version you ran is" if len(edited) == 1 else "versions you ran are"
            lines.append(f"{_named(edited)} {changed} ran; the {used} used")
        return tuple(lines)


def _named(cells: list[Cell]) -> str:
    """Return 'cell [3]' or 'cells [3], [5] and 2 more'."""
    numbers = _listed([f"[{cell.number}]" for cell in cells])
    return f"cell{'s' if len(cells) > 1 else ''} {numbers}"


def _has_code(source: str) -> bool:
    """True if a cell contains more than comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in source.split("\n"))


def _is_tpunb_cell(source: str) -> bool:
    """True for a cell with tpunb's own magics, which runs do not repeat."""
    return any(name.startswith("tpu_") for name in cell_magics(source))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
