"""Which cell of the document an execution was of.

By the front end's ids where it sends them, else by text. The rules are those of
`tpunb.notebook.capture`.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from tpunb.models import Cell
from tpunb.notebook.history import Execution

Key = int | str
"""A cell of the document, by its index; or a cell that is not in it, by a name of ours."""

ALIKE = 0.6
"""How much two texts must agree to count as versions of one cell (difflib's ratio)."""
SHORT = 400
"""Letters up to which texts are compared letter by letter, which takes time for long ones."""
NEAR = 20
"""Cells that are compared with one whose text is not in the document: those nearest to it."""


def identify(
    document: tuple[Cell, ...], executed: Sequence[Execution], saved: float
) -> list[Key | None]:
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
    # Runners of whole notebooks execute each cell once, and have no ids.
    person = saved == math.inf or any(run.id for run in executed)
    for index, key in enumerate(keys):
        if key is None:
            keys[index] = _match_alike(document, executed, keys, index, older=person)
    return keys


def _match_equal(
    document: tuple[Cell, ...], executed: Sequence[Execution], keys: list[Key | None]
) -> None:
    """Give executions without a key the document cell of equal text, in order."""
    places: dict[str, list[int]] = {}
    for cell in document:
        if cell.kind == "code":
            places.setdefault(plain(cell.source), []).append(cell.index)
    claimed: set[int] = set()
    at = -1
    for index, run in enumerate(executed):
        if keys[index] is not None:
            continue
        equal = places.get(plain(run.source), [])
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
    With `older` (a person executes cells) it is an older version of a cell, None, if an alike
    one ran later. Else it is a cell of its own.
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
    """Whether texts are versions of one cell's text: short ones by letters, others by lines."""

    def __init__(self, text: str) -> None:
        # Without `autojunk`, which takes every frequent letter of a longer text for noise.
        self._letters = difflib.SequenceMatcher(None, b=text[:SHORT], autojunk=False)
        self._lines = difflib.SequenceMatcher(None, b=_lines(text), autojunk=False)
        self._short = len(text) <= SHORT
        self._own = frozenset(_lines(text))

    def __call__(self, other: str) -> bool:
        match: difflib.SequenceMatcher[Any]
        if self._short and len(other) <= SHORT:
            match = self._letters
            match.set_seq1(other)
        else:
            match = self._lines
            lines = _lines(other)
            if self._own.isdisjoint(lines):
                return False
            match.set_seq1(lines)
        return match.real_quick_ratio() >= ALIKE and match.quick_ratio() >= ALIKE <= match.ratio()


@functools.lru_cache(maxsize=1000)
def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def plain(source: str) -> str:
    """A cell's text without what makes no difference: blank lines around it, blanks at ends."""
    return "\n".join(line.rstrip() for line in source.splitlines()).strip("\n")
