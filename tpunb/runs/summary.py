"""The summary of a finished run, from its folder."""

from __future__ import annotations

import contextlib
import enum
import math

from tpunb.runs import heartbeat, metrics, trace
from tpunb.runs.chips import describe_chips, mean_duty, read_chips
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.heartbeat import Heartbeat
from tpunb.runs.metrics import Row
from tpunb.runs.result import Advice, RunResult, Summary
from tpunb.runs.spec import PhaseKind, RunState
from tpunb.runs.step_times import StepTimes
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
BUSY = 70.0
"""Percent of the duty cycle from which on nothing is said about what limits it."""
MUCH = 0.2
"""Share of the training from which on a wait counts as its limit."""
SHORT = 10.0
"""Seconds of training in which nothing is worth saying: it only starts."""


class _Limit(enum.Enum):
    """What the chips wait for."""

    INPUT = enum.auto()
    COMPILING = enum.auto()
    CHECKPOINTS = enum.auto()


_LIMITS = {
    _Limit.INPUT: (
        "the input is the limit",
        "DataLoader(num_workers=…, persistent_workers=True), smaller files, or data in memory: "
        "docs/training.md, Input",
    ),
    _Limit.COMPILING: (
        "compiling is the limit",
        "equal shapes in all steps need one program, and a longer run pays it once; "
        "%%tpu_debug says what differs",
    ),
    _Limit.CHECKPOINTS: (
        "writing checkpoints is the limit",
        "save less often, or to a nearer disk",
    ),
}
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
    chips = read_chips(run.path, result.hosts)
    advice = _advice(run, result, rows, heartbeats)
    if (limit := _limit(dict(spent), heartbeats, mean_duty(chips))) is not None:
        advice.append(limit)
    steps, command, missing = _profile(run, result)
    return Summary(
        tuple(metrics.best_values(rows)[:MOST]),
        spent,
        (*advice, *missing),
        metrics.curves(rows, POINTS),
        describe_chips(chips),
        steps,
        command,
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


def _profile(run: RunDir, result: RunResult) -> tuple[StepTimes | None, str, list[Advice]]:
    """Of `--profile`: a mean step, the command that opens the trace, and why there is none."""
    try:
        profile = run.read_spec().profile
    except (OSError, ValueError):
        return None, "", []
    if profile is None:
        return None, "", []
    steps = trace.read_step_times(run, profile, result.world_size, result.attempts)
    if any(trace.session_of(run, profile).glob(f"*{trace.SUFFIX}")):
        return steps, f"pip install xprof && xprof --logdir {run.profile}", []
    if result.state is not RunState.SUCCEEDED:
        return steps, "", []
    missing = Advice(
        f"--profile has no trace of steps {profile.first} to {profile.last}",
        "fewer or earlier steps, if the loop was shorter; else room on the disk, and no other "
        "profiler in the cell",
    )
    return steps, "", [missing]


def _limit(
    spent: dict[str, float], heartbeats: list[Heartbeat], duty: float | None
) -> Advice | None:
    """Why the chips were not busy for much of the training; None if they were, or none tells."""
    training = sum(spent.get(part, 0.0) for part in ("compiling", "checkpoints", "training"))
    if duty is None or duty >= BUSY or training < SHORT:
        return None
    waited = max((rank.input_nanoseconds / 1e9 for rank in heartbeats), default=0.0)
    shares = {
        _Limit.INPUT: min(waited / training, 1.0),
        _Limit.COMPILING: spent.get("compiling", 0.0) / training,
        _Limit.CHECKPOINTS: spent.get("checkpoints", 0.0) / training,
    }
    limit = max(shares, key=shares.__getitem__)
    known = f"duty cycle {duty:.0f} %:"
    if shares[limit] >= MUCH:
        what, fix = _LIMITS[limit]
        return Advice(f"{known} {what}, {100 * shares[limit]:.0f} % of the training", fix)
    return Advice(
        f"{known} the chips waited for this host's Python, not for input or compiling",
        "larger steps, no .item() or print of a tensor in each (%%tpu_debug names the lines); "
        "--profile shows the steps",
    )


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
