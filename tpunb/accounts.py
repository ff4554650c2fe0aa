"""Sums up a run that has ended, from its folder."""

from __future__ import annotations

import json
import math

from tpunb import beat, best, records
from tpunb.beat import Beat
from tpunb.models import RunResult
from tpunb.records import Row
from tpunb.rundir import RunDir
from tpunb.summary import Advice, Summary

READ = 20_000_000
"""Bytes of metrics that are read at the end of a run: about a second. Of more, nothing is said."""
MOST = 6
"""Metrics whose best is told."""
MANY = 10
"""Programs that a rank may compile before it is looked at how many steps they served."""
_STEPS_EACH = 5
"""A program that serves fewer steps than this costs more than it gives."""
LONG = 600.0
"""Seconds of training after which it would hurt to begin anew."""


def of(result: RunResult) -> Summary:
    """Best metrics, where the time went, and what is odd: see `Summary`."""
    run = RunDir(result.dir)
    small = run.metrics.exists() and run.metrics.stat().st_size <= READ
    rows = records.of_all_ranks(records.read(run.metrics)) if small else []
    beats = [
        last
        for rank in range(result.world_size)
        if (last := beat.read(run.pulse(result.attempts - 1, rank))) is not None
    ]
    spent = _spent(run, result, beats)
    return Summary(tuple(best.of(rows)[:MOST]), spent, tuple(_advice(run, result, rows, beats)))


def _spent(run: RunDir, result: RunResult, beats: list[Beat]) -> tuple[tuple[str, float], ...]:
    """Seconds of the run's parts, in their order; together they are all of it."""
    phases = _phases(run, result)
    compiling = max((one.compile_nanoseconds / 1e9 for one in beats), default=0.0)
    saving = max(
        (sum(_seconds(run, attempt, rank) for attempt in range(result.attempts))
         for rank in range(result.world_size)), default=0.0,
    )  # fmt: skip
    if (training := phases.pop("training", 0.0)) > 0:
        compiling = min(compiling, training)
        saving = min(saving, training - compiling)
        phases |= {"compiling": compiling, "checkpoints": saving}
        phases["steps and all else"] = training - compiling - saving
    return tuple((what, took) for what, took in phases.items() if took >= 0.05)


def _phases(run: RunDir, result: RunResult) -> dict[str, float]:
    """Seconds from the beginning of each kind of phase to that of the next."""
    found: dict[str, float] = {}
    kind, since = "start", result.started
    lines = run.events.read_text(encoding="utf-8").splitlines() if run.events.exists() else []
    for line in lines:
        event = json.loads(line) if line.endswith("}") else {}
        if event.get("kind") == "Phase" and event["text"] != result.state:
            found[kind] = found.get(kind, 0.0) + max(0.0, event["time"] - since)
            kind, since = _kind(event["text"]), max(since, event["time"])
    found[kind] = found.get(kind, 0.0) + max(0.0, result.ended - since)
    return found


def _kind(phase: str) -> str:
    for kind in ("prelude", "training", "waits"):
        if phase.startswith(kind):
            return {"waits": "waiting for other runs"}.get(kind, kind)
    return "training" if phase.startswith("no sign of life") else "start"


def _seconds(run: RunDir, attempt: int, rank: int) -> float:
    """What a rank says that its checkpoints took."""
    path = run.saving(attempt, rank)
    if not path.exists():
        return 0.0
    return sum(float(line) for line in path.read_text().splitlines() if line)


def _advice(run: RunDir, result: RunResult, rows: list[Row], beats: list[Beat]) -> list[Advice]:
    found = [
        Advice(
            f"{name} is not a number from step {row['step']} on",
            "a smaller learning rate, or clipped gradients",
        )
        for name, row in _lost(rows).items()
    ]
    most = max(beats, key=lambda one: one.compilations_ended, default=Beat())
    if most.compilations_ended > max(MANY, most.steps / _STEPS_EACH):
        found.append(
            Advice(
                f"{most.compilations_ended} programs were compiled in {most.steps} steps",
                "batches of one shape need one program; %%tpu_debug says what differs",
            )
        )
    if result.attempts > 1:
        found.append(
            Advice(
                f"it took {result.attempts} attempts",
                f"run.log says how the first {result.attempts - 1} ended",
            )
        )
    if result.duration > LONG and result.device == "TPU" and not run.checkpoints.exists():
        found.append(
            Advice(
                "it has left no checkpoint",
                "tpunb.save(state, step) lets a later run go on from it",
            )
        )
    return found


def _lost(rows: list[Row]) -> dict[str, Row]:
    """The metrics that ended as something that is no number, and the row where this began."""
    since: dict[str, Row] = {}
    for row in rows:
        for name, value in records.metrics_of(row).items():
            if not math.isnan(value):
                since.pop(name, None)
            elif row["step"] is not None:
                since.setdefault(name, row)
    return since
