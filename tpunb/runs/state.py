"""The state of a run, and requests to stop it, from any process, through the run folder.

A request is a line appended to `requests.jsonl` in the run folder, which the run's supervisor
reads every few hundredths of a second. So any process of the user can make a request, even if the
kernel that started the run has ended; other users cannot, because they cannot write to the folder.

    STARTING ─> WAITING ─> RUNNING ─> STOPPING ─> SUCCEEDED, FAILED, HUNG, TIMED_OUT, INTERRUPTED
        └──────────┴──────────┴──────────┴──────> LOST     (no result, and no process has the lock)
                                                 AWAY     (the same, for a run read from a bucket)
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase, Stopping
from tpunb.runs.result import RunResult
from tpunb.runs.spec import PhaseKind, RunSpec, RunState, Stop, StopCause, StopOrigin
from tpunb.utils import files, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import LineTail
from tpunb.utils.text import date_and_time

T = TypeVar("T")
STARTING = 60.0
"""Seconds that a run may take from its `spec.json` until its supervisor holds the lock."""
RECENT = 1.0
"""Seconds for which a new unheld lock proves nothing, because a supervisor takes it in steps."""
POLL_INTERVAL = 0.05
"""Seconds between two checks of a run that is waited for."""


def run_state(run: RunDir) -> RunState:
    """Return the state of a run.

    It is lost if its supervisor or machine has died, so that nothing will ever write its result.
    A run whose files cannot be read is lost too: a machine that crashes leaves half a file, or an
    empty one.
    """
    while True:
        # In this order: a supervisor writes the result and then releases the lock.
        is_running = run.is_running()
        result = read_result(run)
        if result is not None:
            return result.state
        if is_running:
            return _active_state(run)
        if run.bucket.exists():
            return RunState.AWAY
        if not run.lock.exists():
            return RunState.STARTING if _is_new(run.path, STARTING) else RunState.LOST
        if not _is_new(run.lock, RECENT):
            return RunState.LOST
        time.sleep(POLL_INTERVAL)


def read_result(run: RunDir) -> RunResult | None:
    """Return the result of a run; None if there is none or it cannot be read."""
    try:
        return run.read_result()
    except (OSError, ValueError):  # cut off, or empty
        return None


def remembered(read: Callable[[RunDir], T]) -> Callable[[RunDir], T]:
    """Remember what a function reads of a run that has ended, while the run's files stay as they
    are.
    """
    known: dict[Path, tuple[list[object], T]] = {}

    def read_once(run: RunDir) -> T:
        paths = run.result, run.spec, run.snapshot, run.values, run.env, run.metrics
        found = [*map(files.version_of, paths)]
        if run.path in known and known[run.path][0] == found:
            return known[run.path][1]
        made = read(run)
        if found[0] is not None:
            known[run.path] = found, made
        return made

    return read_once


def read_spec(run: RunDir) -> RunSpec:
    """Return the spec of a run. Raises TpunbError if a crash has left no readable one."""
    try:
        return run.read_spec()
    except (OSError, ValueError):
        raise TpunbError(lost_message(run)) from None


def _is_new(path: Path, seconds: float) -> bool:
    """True if a file was just written; False for a time in the future (the clock was set back)."""
    try:
        return abs(time.time() - path.lstat().st_mtime) < seconds
    except OSError:
        return False


def _active_state(run: RunDir) -> RunState:
    """Return the state of an active run from the last of its events that shows it."""
    for event in reversed(run.read_events()):
        if isinstance(event, Stopping):
            return RunState.STOPPING
        if isinstance(event, Phase):
            queued = event.kind is PhaseKind.QUEUED
            return RunState.WAITING if queued else RunState.RUNNING
    return RunState.RUNNING


def request_stop(run: RunDir, stop: Stop) -> None:
    """Request that the supervisor stop the run.

    Set `stop.now` only if the run was already seen to be stopping: then two requests made at the
    same moment still leave it time to save.
    """
    files.append_text(run.requests, json.dumps({"do": "stop", **asdict(stop)}) + "\n")


def read_stops(requests: LineTail) -> Iterator[Stop]:
    """Yield the stops requested since the last call; lines that are no request are skipped."""
    for line in requests.read():
        with contextlib.suppress(ValueError):  # the user may have edited the file
            request = records.parse(line)
            if isinstance(request, dict) and request.get("do") == "stop":
                yield _stop(request)


def _stop(request: dict[str, Any]) -> Stop:
    """Return the stop in a request; a plain one if its fields were edited: it is still meant."""
    try:
        stop = records.build(Stop, request)
    except ValueError:
        return Stop()
    known = stop.cause in (StopCause.KERNEL_GONE, StopCause.PREEMPTED)
    return stop if known else replace(stop, cause=StopCause.USER)


def stop_run(run: RunDir, reason: str, origin: StopOrigin | None = None) -> Iterator[str]:
    """Request a user's stop, wait until the run has ended, and yield lines for the user.

    Raises TpunbError for a lost run.
    """
    before = run_state(run)
    if not before.active:
        yield describe_end(run)
        return
    hurry = before is RunState.STOPPING
    request_stop(run, Stop(StopCause.USER, reason, origin, now=hurry))
    if hurry:
        yield f"run {run.id} is already being stopped: the rest of its grace period is skipped"
    else:
        grace = read_spec(run).grace
        yield f"stopping run {run.id}: its ranks have {grace:g} s to save; stop again to skip this"
    try:
        wait_for_end(run)
    except KeyboardInterrupt:
        raise TpunbError(
            f"run {run.id} is still stopping; stop again to skip the time to save"
        ) from None
    yield describe_end(run)


def wait_for_end(run: RunDir, most: float = math.inf) -> None:
    """Wait until a run has ended or is lost, or no process on this machine can know whether it has.

    `most`: seconds to wait at most.
    """
    until = time.monotonic() + most
    while (now := run_state(run)).active and now is not RunState.AWAY:
        if time.monotonic() > until:
            return
        time.sleep(POLL_INTERVAL)


def describe_end(run: RunDir) -> str:
    """Describe the end of a run in a line. Raises TpunbError for a lost run."""
    result = read_result(run)
    if result is None:
        raise TpunbError(lost_message(run))
    when = date_and_time(result.ended)
    why = f" ({result.reason})" if result.reason else ""
    return f"run {run.id} has ended: {result.state}{why}, at {when}, after {result.duration:.1f} s"


def lost_message(run: RunDir) -> str:
    return (
        f"run {run.id} is lost: its supervisor or its machine has ended without a result. "
        f"The files written until then are in {run.path}"
    )


def find_active(runs: Path, wanted: str | None) -> RunDir:
    """Return the active run whose id contains `wanted`; with None, the latest active run.

    If no active run matches, return the ended run that does, so that its end can be shown.
    Raises TpunbError if no run matches, or more than one.
    """
    active = [run for run in directory.list_runs(runs) if run_state(run).active]
    matches = active[-1:] if wanted is None else [run for run in active if wanted in run.id]
    return matches[0] if len(matches) == 1 else directory.find_run(runs, wanted)
