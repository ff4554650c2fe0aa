"""Durations of prelude cells in earlier runs of a notebook, for the card of the next run.

They are needed for cells that have not run in the kernel since tpunb was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.events import Phase
from tpunb.runs.spec import Block, PhaseKind
from tpunb.utils.errors import TpunbError

LOOKED_AT = 5
"""The number of newest runs to read: a run that begins in a kept prelude runs only its rest."""
_TIMESTAMP = len("yyyymmdd-hhmmss")
"""The length of the time at the beginning of an id."""


def with_last_times(blocks: Sequence[Block], script: str, run: RunDir) -> tuple[Block, ...]:
    """Return the blocks of a script with missing durations filled in from earlier runs.

    `run` is the run about to begin; earlier runs of the same name are read. Cells are matched by
    their text.
    """
    lines = script.split("\n")
    unknown = {
        _text(block, lines): block
        for block in blocks
        if block.role == "prelude" and block.seconds is None and not block.values
    }
    found: dict[str, float] = {}
    for earlier in _latest(run) if unknown else ():
        for text, seconds in _times(earlier):
            found.setdefault(text, seconds)
        if found.keys() >= unknown.keys():
            break
    return tuple(
        replace(block, seconds=found.get(_text(block, lines)))
        if block.role == "prelude" and block.seconds is None and not block.values
        else block
        for block in blocks
    )


def _latest(run: RunDir) -> list[RunDir]:
    """Return the latest runs before `run` with the same name, newest first."""
    name = run.id[_TIMESTAMP:]
    try:
        runs = list_runs(run.path.parent)
        named = [other for other in runs if other.id.endswith(name) and other.id != run.id]
    except TpunbError:  # an unusable folder is reported when the run is written
        return []
    return named[: -LOOKED_AT - 1 : -1]


def _times(run: RunDir) -> Iterator[tuple[str, float]]:
    """Yield the text of each prelude cell that a run has executed, and its duration in seconds."""
    try:
        spec = run.read_spec()
        lines = run.script.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):  # of another version, or written in part
        return
    prelude = [block for block in spec.blocks if block.role == "prelude"]
    phases = [event for event in run.read_events() if isinstance(event, Phase)]
    for phase, after in pairwise(phases):
        ended = after.kind in (PhaseKind.PRELUDE, PhaseKind.TRAINING)  # else the cell failed
        position = phase.position or 0
        if phase.kind is PhaseKind.PRELUDE and ended and 0 < position <= len(prelude):
            yield _text(prelude[position - 1], lines), after.time - phase.time


def _text(block: Block, lines: Sequence[str]) -> str:
    return "\n".join(lines[block.first - 1 : block.last])
