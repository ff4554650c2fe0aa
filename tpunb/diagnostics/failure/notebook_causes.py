"""What the notebook shows of a failure's cause: lint's finding at the line where ranks stopped
matching, and a cell that has not finished in the kernel either.
"""

from __future__ import annotations

from tpunb.notebook.convert.cells import skip_reason
from tpunb.notebook.files import cell_magics
from tpunb.notebook.lint.checks.collectives import ON_SOME_RANKS
from tpunb.notebook.lint.findings import Finding
from tpunb.notebook.lint.linter import lint
from tpunb.notebook.models import Cell, Snapshot
from tpunb.runs.directory import RunDir
from tpunb.runs.result import Diagnosis, Evidence, RunResult
from tpunb.runs.spec import FailureKind
from tpunb.utils import records

COLLECTIVE_ERRORS = frozenset(("MismatchError", "LaunchMismatchError", "DeadlockError"))
"""Exceptions of a rehearsal (`backends/rehearsal/errors.py`) for ranks that do different things."""
PAGE = "docs/lint.md"


def lint_cause(result: RunResult) -> Diagnosis | None:
    """Return the collective that only some ranks reach, if this is why the run failed.

    A finding at the line of a failure is always the cause. If the ranks failed at other lines,
    because they met in another collective, a finding is the cause only if it is the only one.
    """
    lost = [
        failure
        for failure in result.failures
        if failure.kind in (FailureKind.PEER_LOST, FailureKind.HANG)
        or failure.type in COLLECTIVE_ERRORS
    ]
    if not lost or len(lost) < len(result.failures):
        return None
    found = [one for one in _findings(result) if one.rule == ON_SOME_RANKS]
    places = {(failure.cell, failure.line) for failure in lost}
    here = [one for one in found if (one.cell, one.line) in places]
    if here:
        return _diagnosis(here[0], 0.95)
    hung = any(failure.kind is FailureKind.HANG for failure in lost)
    return _diagnosis(found[0], 0.75) if len(found) == 1 and not hung else None


def unfinished_cause(result: RunResult) -> Diagnosis | None:
    """Return the cell above the train cell that did not finish in the kernel, if the run failed in
    it, or if its ranks did not find each other after it.
    """
    first = result.failure
    cells, train = _cells(result)
    for cell in cells[:train]:
        if first is None or not cell.failed or skip_reason(cell.source, cell.tags) is not None:
            continue
        if "tpu_train" in cell_magics(cell.source):
            continue  # another train cell, which is no part of this run
        if first.cell == cell.number or first.kind is FailureKind.PEER_LOST:
            return Diagnosis(
                "unfinished-cell",
                f"Cell [{cell.number}] did not finish in the kernel, and is part of the run.",
                "Correct it and run it again, or leave it out of runs: tag it tpu-skip, or begin "
                "it with the line `# tpu: skip`.",
                (),
                0.95,
                "",
            )
    return None


def _cells(result: RunResult) -> tuple[tuple[Cell, ...], int | None]:
    """The cells of the run as they are saved in its folder, and the index of the train cell."""
    try:
        kept = records.read(RunDir(result.dir).snapshot)
        cells = tuple(records.build(Cell, cell) for cell in kept["cells"])
        train = kept["train"]
    except (OSError, ValueError, LookupError, TypeError):  # an older run, a damaged folder
        return (), None
    return cells, train if isinstance(train, int) else None


def _findings(result: RunResult) -> list[Finding]:
    run = Snapshot(*_cells(result), None, "a run")
    return lint(run, backend=result.backend, ranks=result.world_size, own=True)


def _diagnosis(finding: Finding, confidence: float) -> Diagnosis:
    where = f"cell [{finding.cell}], line {finding.line}"
    return Diagnosis(
        finding.rule,
        f"In {where} {finding.message}.",
        f"{finding.fix[0].upper()}{finding.fix[1:]}.",
        (Evidence(f"line {finding.line}: {finding.source.strip()}", cell=finding.cell),),
        confidence,
        PAGE,
    )
