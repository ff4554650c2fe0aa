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
    added: frozenset[int] = frozenset()
    """Indices of the cells that were added, in the new notebook."""

    def report(self) -> str:
        """What was done and what is left to do, as text."""
        names = called(self.original)
        if not self.changes:
            return "nothing to migrate\n"
        lines = []
        for kind, title in TITLES.items():
            found = [change for change in self.changes if change.kind == kind]
            if found:
                lines.append(f"{len(found)} {title}:")
            for change in found:
                place = f"{names[change.cell]}, line {change.line}"
                lines.append(f"  {place}: {change.before}\n    {change.what}")
        return "\n".join(lines) + "\n"

    def diff(self) -> str:
        """A unified diff, cell by cell; empty if nothing changed."""
        return "".join(self._diffs())

    def pairs(self) -> Iterator[tuple[Mapping[str, Any] | None, Mapping[str, Any]]]:
        """Each cell of the new notebook with what it was; None for a cell that was added."""
        old = iter(self.original["cells"])
        for index, cell in enumerate(self.notebook["cells"]):
            yield (None if index in self.added else next(old)), cell

    def _diffs(self) -> Iterator[str]:
        names = iter(called(self.original))
        for old, new in self.pairs():
            name = "a new cell" if old is None else next(names)
            before, after = "" if old is None else text_of(old), text_of(new)
            if before != after:
                lines = difflib.unified_diff(
                    before.split("\n") if before else [], after.split("\n"), name, name, lineterm=""
                )
                yield "\n".join(lines) + "\n"


def called(notebook: Mapping[str, Any]) -> list[str]:
    """What to call each cell: by the number beside it, else by its position among code cells."""
    names = []
    code = 0
    for cell in notebook["cells"]:
        if cell.get("cell_type") != "code":
            names.append(f"the {cell.get('cell_type')} cell below [{code}]")
            continue
        code += 1
        names.append(f"cell [{cell.get('execution_count') or code}]")
    return names


LOAD = "%load_ext tpunb"
"""What the cell holds that makes a notebook one for tpunb."""


def text_of(cell: Mapping[str, Any]) -> str:
    """A cell's source as one string (in files it is often a list of lines)."""
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)
