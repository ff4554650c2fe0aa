"""Small notebooks as snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from tpunb.notebook.files import cell_magics
from tpunb.notebook.lint.findings import Finding
from tpunb.notebook.lint.linter import lint
from tpunb.notebook.models import Cell, Snapshot


def notebook(*sources: str, tags: Sequence[tuple[int, str]] = ()) -> Snapshot:
    """Code cells, numbered from 1; the train cell is the last one with %%tpu_train."""
    cells = tuple(
        Cell(
            at,
            "code",
            source.strip("\n"),
            number=at + 1,
            tags=tuple(tag for index, tag in tags if index == at),
        )
        for at, source in enumerate(sources)
    )
    trains = [cell.index for cell in cells if "tpu_train" in cell_magics(cell.source)]
    return Snapshot(cells, trains[-1] if trains else None, None, "a test")


def found(*sources: str) -> list[Finding]:
    """The findings in fragments of notebooks, without those for undefined names."""
    return [f for f in lint(notebook(*sources)) if f.rule != "undefined-name"]


def rules(*sources: str) -> list[str]:
    return [finding.rule for finding in found(*sources)]
