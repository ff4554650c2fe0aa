"""The changes of a migration, with a readable report and a diff."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
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
    left: tuple[str, ...] = ()
    """Names of the old library that remain in the new notebook, each with its cell."""

    @property
    def changed(self) -> bool:
        """Whether the notebook differs from the original."""
        return self.notebook != self.original

    def report(self) -> str:
        """Return the changes and the remaining work as text."""
        names = cell_labels(self.original)
        if not self.changes and not self.left:
            return "nothing to migrate\n"
        lines = []
        if self.left:
            lines.append(f"NOT COMPLETE, names of torch_xla are left: {', '.join(self.left)}")
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
        originals = zip(cell_labels(self.original), self.original["cells"], strict=True)
        lines: list[str] = []
        for index, cell in enumerate(self.notebook["cells"]):
            name, old = ("a new cell", None) if index in self.added else next(originals)
            before = text_of(old).split("\n") if old is not None and text_of(old) else []
            after = text_of(cell).split("\n") if text_of(cell) else []
            lines += difflib.unified_diff(before, after, name, name, lineterm="")
        return "".join(f"{line}\n" for line in lines)


def cell_labels(notebook: Mapping[str, Any]) -> list[str]:
    """A label for each cell: its execution count, or its position among the code cells."""
    names = []
    code = 0
    for cell in notebook["cells"]:
        if cell.get("cell_type") == "code":
            code += 1
            names.append(f"cell [{cell.get('execution_count') or code}]")
        else:
            names.append(f"the {cell.get('cell_type')} cell below [{code}]")
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
