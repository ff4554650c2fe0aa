"""What a migration did: `Change` by change, with a report and a diff for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["rewritten", "marked", "skipped"]

MARK = "# tpunb migrate: "
"""How the comments begin that a migration leaves in a notebook."""


@dataclass(frozen=True)
class Change:
    """One thing that was rewritten, or that a person has to look at."""

    cell: int
    """Position of the cell in the notebook as it was, from 0, all kinds of cells counted."""
    line: int
    """Line in the cell as it was, from 1."""
    kind: Kind
    """`marked`: a comment in the notebook says what is left to do. `skipped`: the cell could not
    be read and is as it was."""
    before: str
    """What stood there, on one line."""
    what: str
    """What it became, or what to do."""

    def __str__(self) -> str:
        return f"cell {self.cell + 1}, line {self.line}: {self.before}\n    {self.what}"


TITLES: dict[Kind, str] = {
    "rewritten": "rewritten",
    "marked": "to be looked at (marked in the notebook)",
    "skipped": "left as they are",
}


@dataclass(frozen=True)
class Migration:
    """A migrated notebook, and what was changed in it."""

    notebook: dict[str, Any]
    """In the form in which it was given; only sources differ, and with `train` one cell more."""
    changes: tuple[Change, ...]
    original: Mapping[str, Any]
    """The notebook as it was."""

    def report(self) -> str:
        """What was done and what is left to do, as text; cells are counted from 1."""
        if not self.changes:
            return "nothing to migrate\n"
        lines = []
        for kind, title in TITLES.items():
            found = [change for change in self.changes if change.kind == kind]
            if found:
                lines += [f"{len(found)} {title}:", *(f"  {change}" for change in found)]
        return "\n".join(lines) + "\n"

    def diff(self) -> str:
        """A unified diff, cell by cell; empty if nothing changed."""
        return "".join(_diffs(self.original["cells"], self.notebook["cells"]))


def text_of(cell: Mapping[str, Any]) -> str:
    """A cell's source as one string (in files it is often a list of lines)."""
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _diffs(old: list[Mapping[str, Any]], new: list[Mapping[str, Any]]) -> Iterator[str]:
    # At most one cell was added; what is before it has the same index in both.
    added = len(new) - len(old)
    place = 0
    for index, cell in enumerate(new):
        if added and (place == len(old) or cell is not new[-1]) and _is_added(cell, old, place):
            before, name, added = "", f"new cell {index + 1}", 0
        else:
            before, name = text_of(old[place]), f"cell {place + 1}"
            place += 1
        after = text_of(cell)
        if before != after:
            lines = difflib.unified_diff(
                before.split("\n") if before else [], after.split("\n"), name, name, lineterm=""
            )
            yield "\n".join(lines) + "\n"


def _is_added(cell: Mapping[str, Any], old: list[Mapping[str, Any]], place: int) -> bool:
    return (
        place == len(old)
        or cell.get("cell_type") != old[place].get("cell_type")
        or (text_of(cell) == LOAD and text_of(old[place]) != LOAD)
    )


LOAD = "%load_ext tpunb"
