"""The summary of a finished run, from its folder."""

from __future__ import annotations

import contextlib
import math

from tpunb.runs import heartbeat, metrics
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.heartbeat import Heartbeat
from tpunb.runs.metrics import Row
from tpunb.runs.result import Advice, RunResult, Summary
from tpunb.runs.spec import PhaseKind
from tpunb.utils import files

READ = 20_000_000
"""Bytes of metrics that are read at the end of a run, in about a second; larger files are not."""
MOST = 6
"""Metrics whose best value is shown."""
POINTS = 120
"""Points of a metric's curve."""
MANY = 10
"""Programs that a rank may compile before their number is compared with that of its steps."""
_STEPS_EACH = 5
"""Steps that a compiled program should serve at least."""
LONG = 600.0
"""Seconds of a run after which a missing checkpoint is worth a note."""
_PARTS = {
    PhaseKind.QUEUED: "waiting for other runs",
    PhaseKind.STARTING: "start",
    PhaseKind.PRELUDE: "prelude",
    PhaseKind.TRAINING: "training",
    PhaseKind.COLLECTING_STACKS: "training",
}


def summarize(result: RunResult) -> Summary:
    """Best metrics, time per phase and warnings."""
    run = RunDir(result.dir)
    rows = read_steps(run)
    heartbeats = [
        last
        for rank in range(result.world_size)
        if (last := heartbeat.read_heartbeat(run.heartbeat(result.attempts - 1, rank))) is not None
    ]
    spent = _spent(run, result, heartbeats)
    return Summary(
        tuple(metrics.best_values(rows)[:MOST]),
        spent,
        tuple(_advice(run, result, rows, heartbeats)),
        metrics.curves(rows, POINTS),
    )


def read_steps(run: RunDir, most: int = READ) -> list[Row]:
    """A row for each step that all ranks of a metric have logged, reduced over them.

    None if there are more than `most` bytes to read.
    """
    if has_more(run, most):
        return []
    return metrics.reduce_rows(metrics.read_rows(run.metrics), whole=True)


def has_more(run: RunDir, most: int = READ) -> bool:
    """Whether a run has more than `most` bytes of metrics."""
    try:
        return run.metrics.lstat().st_size > most
    except OSError:
        return False


def _spent(
    run: RunDir, result: RunResult, heartbeats: list[Heartbeat]
) -> tuple[tuple[str, float], ...]:
    """Seconds of the run's parts, in their order; together they are all of it."""
    phases = _phases(run, result)
    compiling = max((rank.compile_nanoseconds / 1e9 for rank in heartbeats), default=0.0)
    saving = max(
        (
            sum(_saving_seconds(run, attempt, rank) for attempt in range(result.attempts))
            for rank in range(result.world_size)
        ),
        default=0.0,
    )
    if (training := phases.pop("training", 0.0)) > 0:
        compiling = min(compiling, training)
        saving = min(saving, training - compiling)
        phases |= {"compiling": compiling, "checkpoints": saving}
        phases["training"] = training - compiling - saving
    return tuple((what, took) for what, took in phases.items() if took >= 0.05)


def _phases(run: RunDir, result: RunResult) -> dict[str, float]:
    """Seconds from the beginning of each kind of phase to that of the next."""
    spent: dict[str, float] = {}
    name, since = _PARTS[PhaseKind.STARTING], result.started
    for event in run.read_events():
        if isinstance(event, Phase) and event.kind is not PhaseKind.ENDED:
            spent[name] = spent.get(name, 0.0) + max(0.0, event.time - since)
            name, since = _PARTS[event.kind], max(since, event.time)
    spent[name] = spent.get(name, 0.0) + max(0.0, result.ended - since)
    return spent


def _saving_seconds(run: RunDir, attempt: int, rank: int) -> float:
    """Seconds that the checkpoints of a rank took."""
    try:
        lines = files.read_start(run.saving(attempt, rank), READ).split()
    except (FileNotFoundError, PermissionError):
        return 0.0
    seconds = 0.0
    for line in lines:
        with contextlib.suppress(ValueError):  # a crash has cut it off
            seconds += float(line)
    return seconds if math.isfinite(seconds) else 0.0


def _advice(
    run: RunDir, result: RunResult, rows: list[Row], heartbeats: list[Heartbeat]
) -> list[Advice]:
    advice = [
        Advice(
            f"{name} is not a number from step {row['step']} on",
            "a smaller learning rate, or clipped gradients",
        )
        for name, row in _became_nan(rows).items()
    ]
    most = max(heartbeats, key=lambda rank: rank.compilations_ended, default=Heartbeat())
    if most.compilations_ended > max(MANY, most.steps / _STEPS_EACH):
        advice.append(
            Advice(
                f"{most.compilations_ended} programs were compiled in {most.steps} steps",
                "batches of one shape need one program; %%tpu_debug says what differs",
            )
        )
    if result.attempts > 1:
        advice.append(
            Advice(
                f"it took {result.attempts} attempts",
                f"run.log says how the first {result.attempts - 1} ended",
            )
        )
    if result.duration > LONG and result.device == "TPU" and not run.checkpoints.exists():
        advice.append(
            Advice(
                "it has left no checkpoint",
                "tpunb.save(state, step) lets a later run continue from it",
            )
        )
    return advice


def _became_nan(rows: list[Row]) -> dict[str, Row]:
    """The metrics that ended as NaN, and the row in which each became NaN."""
    since: dict[str, Row] = {}
    for row in rows:
        for name, value in metrics.values_of(row).items():
            if not math.isnan(value):
                since.pop(name, None)
            elif row["step"] is not None:
                since.setdefault(name, row)
    return since
