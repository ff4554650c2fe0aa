"""Small notebooks as snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from tpunb.lint.check import lint
from tpunb.lint.findings import Finding
from tpunb.models import Cell, Snapshot
from tpunb.script.cells import magics


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
    trains = [cell.index for cell in cells if "tpu_train" in magics(cell.source)]
    return Snapshot(cells, trains[-1] if trains else None, None, "a test")


def found(*sources: str) -> list[Finding]:
    return lint(notebook(*sources))


def rules(*sources: str) -> list[str]:
    return [finding.rule for finding in found(*sources)]
