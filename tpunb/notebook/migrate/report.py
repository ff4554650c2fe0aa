"""The changes of a migration, with a readable report and a diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["rewritten", "marked", "skipped"]

MARK = "# tpunb migrate: "
"""The beginning of the comments that a migration adds to a notebook."""


@dataclass(frozen=True)
class Change:
    """One change: code that was rewritten, or that a person has to check."""

    cell: int
    """Position of the cell in the notebook as it was, from 0, all kinds of cells counted."""
    line: int
    """Line in the cell as it was, from 1."""
    kind: Kind
    """`marked`: a comment in the notebook says what remains to be done. `skipped`: the code is
    unchanged, and the report says why or what to do."""
    before: str
    """The old code, on one line."""
    what: str
    """The new code, or the action that is needed."""


TITLES: dict[Kind, str] = {
    "rewritten": "rewritten",
    "marked": "to be checked (marked in the notebook)",
    "skipped": "left unchanged",
}


@dataclass(frozen=True)
class Migration:
    """A migrated notebook and its changes."""

    notebook: dict[str, Any]
    """Only sources differ from the original; with `train` cells may be added."""
    changes: tuple[Change, ...]
    original: Mapping[str, Any]
    """The notebook before the migration."""
    added: frozenset[int] = frozenset()
    """Indices of the cells that were added, in the new notebook."""

    @property
    def changed(self) -> bool:
        """Whether the notebook differs from the original."""
        return self.notebook != self.original

    def report(self) -> str:
        """Return the changes and the remaining work as text."""
        names = cell_labels(self.original)
        if not self.changes:
            return "nothing to migrate\n"
        lines = []
        for kind, title in TITLES.items():
            changes = [change for change in self.changes if change.kind == kind]
            if changes:
                lines.append(f"{len(changes)} {title}:")
            for change in changes:
                place = f"{names[change.cell]}, line {change.line}"
                lines.append(f"  {place}: {change.before}\n    {change.what}")
        return "\n".join(lines) + "\n"

    def diff(self) -> str:
        """Return a unified diff, cell by cell; empty if nothing changed."""
        return "".join(self._diffs())

    def pairs(self) -> Iterator[tuple[Mapping[str, Any] | None, Mapping[str, Any]]]:
        """Yield each cell of the new notebook with its original; None for an added cell."""
        old = iter(self.original["cells"])
        for index, cell in enumerate(self.notebook["cells"]):
            yield (None if index in self.added else next(old)), cell

    def _diffs(self) -> Iterator[str]:
        names = iter(cell_labels(self.original))
        for old, new in self.pairs():
            name = "a new cell" if old is None else next(names)
            before, after = "" if old is None else text_of(old), text_of(new)
            if before != after:
                lines = difflib.unified_diff(
                    before.split("\n") if before else [], after.split("\n"), name, name, lineterm=""
                )
                yield "\n".join(lines) + "\n"


def cell_labels(notebook: Mapping[str, Any]) -> list[str]:
    """A label for each cell: its execution count, or its position among the code cells."""
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
"""The cell that loads tpunb."""


def text_of(cell: Mapping[str, Any]) -> str:
    """Return a cell's source as one string (in files it is often a list of lines)."""
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def source_like(cell: Mapping[str, Any], text: str) -> str | list[str]:
    """Return a text as a string or a list of lines, like the source of `cell`."""
    if isinstance(cell["source"], str):
        return text
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
