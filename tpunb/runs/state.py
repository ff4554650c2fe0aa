"""How a run stands, and requests to stop it, from any process: through its folder.

A request is a line appended to `requests.jsonl` in the run folder, which the run's supervisor
reads every few hundredths of a second. So it does not matter who asks, or whether the kernel that
started the run still lives; and as only its user can write to the folder, nobody else can ask.

    STARTING ─> WAITING ─> RUNNING ─> STOPPING ─> SUCCEEDED, FAILED, HUNG, TIMED_OUT, INTERRUPTED
        └──────────┴──────────┴──────────┴──────> LOST     (no result, and nobody holds the lock)
                                                 AWAY     (the same, of a detached run at a place,
                                                           and of one that is read from a bucket)
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase, Stopping
from tpunb.runs.result import RunResult
from tpunb.runs.spec import PhaseKind, RunSpec, RunState, StopCause, StopOrigin
from tpunb.utils import files, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import date_and_time

STARTING = 60.0
"""Seconds that a run may take from its `spec.json` until its supervisor holds the lock."""
RECENT = 1.0
"""Seconds for which a new lock that nobody holds says nothing: a supervisor takes it in steps."""
LOOK = 0.05
"""Seconds between two looks at a run that is waited for."""


def run_state(run: RunDir) -> RunState:
    """How a run stands.

    It is lost if its supervisor or its machine has died, so that nothing will ever say how it
    ended. A folder that cannot be read is lost too: a machine that crashes leaves half a file,
    or an empty one.
    """
    while True:
        # In this order: a supervisor writes the result and then releases the lock.
        is_running = run.is_running()
        result = read_result(run)
        if result is not None:
            return result.state
        if is_running:
            return _active_state(run)
        if run.copied.exists():
            return RunState.AWAY
        gone = RunState.AWAY if run.is_away() else RunState.LOST
        if not run.lock.exists():
            return RunState.STARTING if _is_new(run.path, STARTING) else gone
        if not _is_new(run.lock, RECENT):
            return gone
        time.sleep(LOOK)


def read_result(run: RunDir) -> RunResult | None:
    """The result of a run, or None if there is none that can be read."""
    try:
        return run.read_result()
    except (OSError, ValueError):  # cut off, or empty
        return None


def read_spec(run: RunDir) -> RunSpec:
    """What was to run. Raises TpunbError if a crash has left nothing that can be read."""
    try:
        return run.read_spec()
    except (OSError, ValueError):
        raise TpunbError(lost_message(run)) from None


def _is_new(path: Path, seconds: float) -> bool:
    """Whether a file was written just now; one from the future was not: the clock was set back."""
    try:
        return abs(time.time() - path.lstat().st_mtime) < seconds
    except OSError:
        return False


def _active_state(run: RunDir) -> RunState:
    """By the last of its events that says."""
    for event in reversed(run.read_events()):
        if isinstance(event, Stopping):
            return RunState.STOPPING
        if isinstance(event, Phase):
            queued = event.kind is PhaseKind.QUEUED
            return RunState.WAITING if queued else RunState.RUNNING
    return RunState.RUNNING


def request_stop(
    run: RunDir,
    reason: str,
    *,
    cause: StopCause = StopCause.USER,
    origin: StopOrigin | None = None,
    now: bool = False,
) -> None:
    """Ask the supervisor to stop the run; with `now`: without a grace period.

    `cause`: that a user wants it, or that the kernel of a run at a place is gone.

    Haste is for who has seen that the run is being stopped: two who ask in the same moment both
    leave it time to save.
    """
    request = {"do": "stop", "cause": cause, "reason": reason, "origin": origin, "now": now}
    files.append_text(run.requests, json.dumps(request) + "\n")


def stop_run(run: RunDir, reason: str, origin: StopOrigin | None = None) -> Iterator[str]:
    """Ask a run to stop and wait until it has ended; yields lines for the user.

    Raises TpunbError for a lost run.
    """
    before = run_state(run)
    if not before.active:
        yield describe_end(run)
        return
    hurry = before is RunState.STOPPING
    request_stop(run, reason, origin=origin, now=hurry)
    if hurry:
        yield f"run {run.id} is being stopped already: the rest of its grace period is skipped"
    else:
        grace = read_spec(run).grace
        yield f"stopping run {run.id}: its ranks have {grace:g} s to save; stop it again to hurry"
    try:
        wait_for_end(run)
    except KeyboardInterrupt:
        raise TpunbError(f"run {run.id} is still being stopped; stop it again to hurry") from None
    yield describe_end(run)


def wait_for_end(run: RunDir, most: float = math.inf) -> None:
    """Return once a run has ended or is lost, or nobody here follows it any more.

    `most`: seconds after which it also returns.
    """
    until = time.monotonic() + most
    while (now := run_state(run)).active and now is not RunState.AWAY:
        if time.monotonic() > until:
            return
        time.sleep(LOOK)


def describe_end(run: RunDir) -> str:
    """How a run ended, in a line. Raises TpunbError for a lost run."""
    result = read_result(run)
    if result is None:
        raise TpunbError(lost_message(run))
    when = date_and_time(result.ended, "%Y-%m-%d %H:%M:%S")
    why = f" ({result.reason})" if result.reason else ""
    return f"run {run.id} has ended: {result.state}{why}, at {when}, after {result.duration:.1f} s"


def lost_message(run: RunDir) -> str:
    """What to say about a lost run."""
    if run.is_away():
        return (
            f"the hosts of run {run.id} do not answer, so nobody here knows how it stands. "
            f"`tpunb attach {run.id}` asks them again; what came from them is in {run.path}"
        )
    leftover = records.read_dict(run.place).get("leftover")
    return (
        f"run {run.id} is lost: its supervisor or its machine has ended without a result. "
        f"What it wrote until then is in {run.path}"
    ) + (f". {leftover}" if leftover else "")


def find_active(runs: Path, wanted: str | None) -> RunDir:
    """The active run whose id contains `wanted`; the latest active run for None.

    If no active run fits, the run that does, so that its end can be described. Raises TpunbError
    if none fits, or more than one.
    """
    known = directory.list_runs(runs)
    active = [run for run in known if run_state(run).active]
    if wanted is None:
        if not active and known:
            raise TpunbError(f"no active run in {runs}; last run: {_describe(known[-1])}")
        return active[-1] if active else directory.find_run(runs, None)
    matches = [run for run in active if wanted in run.id]
    return matches[0] if len(matches) == 1 else directory.find_run(runs, wanted)


def _describe(run: RunDir) -> str:
    try:
        return describe_end(run)
    except TpunbError as error:
        return str(error)
