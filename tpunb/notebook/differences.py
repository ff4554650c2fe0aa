"""What to tell a person of differences between the document and what ran, one line each."""

from __future__ import annotations

from collections.abc import Mapping

from tpunb.models import Cell, Snapshot
from tpunb.notebook.files import cell_magics
from tpunb.notebook.history import Execution
from tpunb.notebook.identity import plain

NEVER = "it never ran in this kernel"
FAILED = "it failed"
DELETED = "it was deleted"
MOST = 5
"""Cells that one note names."""


class Differences:
    """What a person should know of differences between the document and what ran."""

    def __init__(self, saved: float, deleted: Mapping[str, float]) -> None:
        self._saved = saved
        self._deleted = deleted
        self._unsaved: list[Cell] = []
        self._edited: list[Cell] = []
        self._moved: list[Cell] = []
        self._lines: list[str] = []

    def without_a_place(self, before: Execution | None) -> None:
        """The train cell is not in the document; `before` is what it is taken to stand after."""
        where = "first" if before is None else f"after [{before.number}], which ran before it"
        self._lines.append(f"the train cell is not in the file yet: it is taken to stand {where}")

    def ran(self, cell: Cell, document: Cell | None, run: Execution) -> None:
        """A cell of the prelude, as it ran and as it is in the document."""
        if _own(cell.source):
            return
        if self._deleted.get(cell.id or "", 0.0) > self._saved:
            self._moved.append(cell)
        # Papermill replaces the cell that it injected before.
        if document is None or "injected-parameters" in document.tags:
            return
        if plain(document.source) != plain(run.source):
            (self._edited if self._saved > run.time else self._unsaved).append(cell)

    def lines(self, laid: Snapshot) -> tuple[str, ...]:
        """One line for each kind of difference."""
        out: dict[str, list[Cell]] = {NEVER: [], FAILED: [], DELETED: []}
        for cell, reason in laid.left_out:
            if not _own(cell.source) and _says_something(cell.source):
                out[reason].append(cell)
        lines = list(self._lines)
        if out[NEVER]:
            never = [f"{laid.called(cell)} ({_title(cell)})" for cell in out[NEVER][:MOST]]
            listed = _listed(never, len(out[NEVER]))
            lines.append(f"never ran in this kernel, so left out: {listed}")
        for what, cells in (
            ("failed and cannot be repeated, so left out", out[FAILED]),
            ("ran and deleted since, so left out", out[DELETED]),
            ("deleted or moved since the notebook was saved, still part of this run", self._moved),
            ("edited and not saved, the text that ran is used", self._unsaved),
            ("edited after it ran, the text that ran is used", self._edited),
        ):
            if cells:
                numbers = _listed([f"[{cell.number}]" for cell in cells[:MOST]], len(cells))
                lines.append(f"{what}: cell{'s' if len(cells) > 1 else ''} {numbers}")
        return tuple(lines)


def _says_something(source: str) -> bool:
    """Whether there is more in a cell than comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in source.splitlines())


def _own(source: str) -> bool:
    """Whether it is a cell of tpunb's own magics, which no run repeats."""
    return any(name.startswith("tpu_") for name in cell_magics(source))


def _title(cell: Cell) -> str:
    line = cell.source.strip().splitlines()[0]
    return line if len(line) <= 40 else f"{line[:39]}…"


def _listed(names: list[str], total: int) -> str:
    more = f" and {total - len(names)} more" if total > len(names) else ""
    return ", ".join(names) + more
