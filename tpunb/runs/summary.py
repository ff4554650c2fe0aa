"""The summary of a finished run, made from its folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

from tpunb.runs import heartbeat, metrics, trace
from tpunb.runs.chips import describe_chips, read_chips
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase
from tpunb.runs.heartbeat import Heartbeat
from tpunb.runs.metrics import Row
from tpunb.runs.result import Advice, RunResult, Summary
from tpunb.runs.spec import BackendName, PhaseKind, RunSpec, RunState
from tpunb.runs.step_times import StepTimes
from tpunb.utils import files

READ = 20_000_000
"""The most bytes of metrics that are read, in about a second; larger files are not read."""
MOST = 6
"""The number of metrics whose best value is shown."""
POINTS = 120
"""The number of points of a metric's curve."""
MANY = 10
"""The number of programs that a rank may compile before it is compared with its steps."""
_STEPS_EACH = 5
"""The number of steps that a compiled program should serve at least."""


_DEVICE_UNUSED: Mapping[BackendName, Advice] = {
    "xla": Advice(
        "no rank used the device: each trained on the CPU",
        "move the model and each batch to it: model.to(torch_xla.device())",
    ),
    "torchtpu": Advice(
        "no optimizer has changed a parameter on the TPU: its parameters are on the CPU",
        "move the model before you create the optimizer: model.to('tpu')",
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
    """Return best metrics, time per phase and advice."""
    run = RunDir(result.dir)
    rows = read_steps(run)
    heartbeats = [
        last
        for rank in range(result.world_size)
        if (last := heartbeat.read_heartbeat(run.heartbeat(result.attempts - 1, rank))) is not None
    ]
    steps, command, missing = _profile(run, result)
    return Summary(
        tuple(metrics.best_values(rows)[:MOST]),
        _spent(run, result, heartbeats),
        (*_advice(run, result, rows, heartbeats), *missing),
        metrics.curves(rows, POINTS),
        describe_chips(read_chips(run.path, result.hosts)),
        steps,
        command,
    )


def read_steps(run: RunDir, most: int = READ) -> list[Row]:
    """Return a row for each step that all ranks of a metric have logged, reduced over them.

    Return [] if there are more than `most` bytes to read.
    """
    if has_more(run, most):
        return []
    return metrics.reduce_rows(metrics.read_rows(run.metrics), whole=True)


def has_more(run: RunDir, most: int = READ) -> bool:
    """True if a run has more than `most` bytes of metrics."""
    try:
        return run.metrics.lstat().st_size > most
    except OSError:
        return False


def _spent(
    run: RunDir, result: RunResult, heartbeats: list[Heartbeat]
) -> tuple[tuple[str, float], ...]:
    """Return the parts of the run and their seconds, in order; together they are the whole run."""
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
    """Return the seconds from the beginning of each kind of phase to the next phase."""
    spent: dict[str, float] = {}
    name, since = _PARTS[PhaseKind.STARTING], result.started
    for event in run.read_events():
        if isinstance(event, Phase) and event.kind is not PhaseKind.ENDED:
            spent[name] = spent.get(name, 0.0) + max(0.0, event.time - since)
            name, since = _PARTS[event.kind], max(since, event.time)
    spent[name] = spent.get(name, 0.0) + max(0.0, result.ended - since)
    return spent


def _saving_seconds(run: RunDir, attempt: int, rank: int) -> float:
    """Return the seconds that the checkpoints of a rank took."""
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
    # Without torch_xla only an optimizer's steps show the device.
    trained = any(r.backward if result.backend == "xla" else r.steps for r in heartbeats)
    unused = _DEVICE_UNUSED.get(result.backend)
    if unused is not None and trained and not any(rank.on_device for rank in heartbeats):
        advice.append(unused)
    most = max(heartbeats, key=lambda rank: rank.compilations_ended, default=Heartbeat())
    if most.compilations_ended > max(MANY, most.steps / _STEPS_EACH):
        fix = "batches of one shape need one program; %%tpu_debug shows what differs"
        spec = _read_spec(run)
        if spec is not None and spec.spmd is not None:
            fix = (
                "fetch sharded tensors together and seldom: each needs a program of its own; " + fix
            )
        advice.append(
            Advice(f"{most.compilations_ended} programs were compiled in {most.steps} steps", fix)
        )
    if result.attempts > 1:
        advice.append(
            Advice(
                f"{result.state} on attempt {result.attempts}",
                "run.log says why the one before failed"
                if result.attempts == 2
                else f"run.log says why the {result.attempts - 1} before failed",
            )
        )
    return advice


def _read_spec(run: RunDir) -> RunSpec | None:
    try:
        return run.read_spec()
    except (OSError, ValueError):  # missing, or damaged
        return None


def _profile(run: RunDir, result: RunResult) -> tuple[StepTimes | None, str, list[Advice]]:
    """Return a mean step of `--profile`, the command to open the trace, and advice without one."""
    spec = _read_spec(run)
    profile = None if spec is None else spec.profile
    if profile is None:
        return None, "", []
    steps = trace.read_step_times(run, profile, result.world_size, result.attempts)
    session = trace.session_of(run, profile)
    if any(session.glob(f"*{trace.SUFFIX}")):
        return steps, f"pip install xprof && xprof --logdir {run.profile}", []
    if any(session.glob(f"*{trace.TORCH_SUFFIX}")):
        return steps, f"https://ui.perfetto.dev, with a file of {session}", []
    if result.state is not RunState.SUCCEEDED:
        return steps, "", []
    missing = Advice(
        f"--profile has no trace of steps {profile.first} to {profile.last}",
        "choose fewer or earlier steps if the loop was shorter; otherwise check that the disk has "
        "room and that the cell starts no other profiler",
    )
    return steps, "", [missing]


def _became_nan(rows: list[Row]) -> dict[str, Row]:
    """Return the metrics that ended as NaN, with the row in which each became NaN."""
    since: dict[str, Row] = {}
    for row in rows:
        for name, value in metrics.values_of(row).items():
            if not math.isnan(value):
                since.pop(name, None)
            elif row["step"] is not None:
                since.setdefault(name, row)
    return since
