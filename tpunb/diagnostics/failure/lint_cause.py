"""Lint's finding at the line where ranks stopped matching, as the cause of the failure."""

from __future__ import annotations

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


def _findings(result: RunResult) -> list[Finding]:
    """Lint's findings in the cells of the run, as they are saved in its folder."""
    try:
        kept = records.read(RunDir(result.dir).snapshot)
        cells = tuple(records.build(Cell, cell) for cell in kept["cells"])
        train = kept["train"]
    except (OSError, ValueError, LookupError, TypeError):  # an older run, a damaged folder
        return []
    run = Snapshot(cells, train if isinstance(train, int) else None, None, "a run")
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
