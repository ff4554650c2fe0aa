"""What anybody may ask of a run, from any process, and how it stands: through its folder.

A request is a line that is appended to `requests.jsonl` in the run folder, where the run's guard
looks every few hundredths of a second. So it does not matter who asks, or whether the kernel
that started the run still lives; and as the folder is its user's alone, nobody else can ask.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tpunb import rundir
from tpunb.errors import TpunbError
from tpunb.models import RunResult, RunSpec
from tpunb.rundir import RunDir

STARTING = 60.0
"""Seconds that a run may take from its `spec.json` until its guard holds the lock."""
RECENT = 1.0
"""Seconds for which a new lock that nobody holds says nothing yet: a guard takes it in steps."""
LOOK = 0.05
"""Seconds between two looks at a run that is waited for."""

ALIVE = ("starting", "waiting", "running", "stopping")
"""The states of a run that has not ended."""


def state(run: RunDir) -> str:
    """How a run stands: one of `ALIVE`, a result's state, or 'lost'.

    'lost': its guard or its machine has died, so nobody will ever say how it ended. Who cannot
    be read is lost too: a machine that crashes leaves half a file, or an empty one.
    """
    while True:
        # In this order: a guard writes the result, and then lets go of the lock.
        goes_on = run.is_running()
        result = read_result(run)
        if result is not None:
            return result.state
        if goes_on:
            return _doing(run)
        if not run.lock.exists():
            return "starting" if _age(run.path) < STARTING else "lost"
        if _age(run.lock) > RECENT:
            return "lost"
        time.sleep(LOOK)


def read_result(run: RunDir) -> RunResult | None:
    """The result of a run, or None where there is none that can be read."""
    try:
        return run.read_result()
    except (OSError, ValueError, TypeError, KeyError):  # cut off, or empty
        return None


def read_spec(run: RunDir) -> RunSpec:
    """What was to run. Raises TpunbError where a crash has left nothing that can be read."""
    try:
        return run.read_spec()
    except (OSError, ValueError, TypeError, KeyError):
        raise TpunbError(lost(run)) from None


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _doing(run: RunDir) -> str:
    """What the last of its events says that matters here."""
    found = "running"
    try:
        lines = run.events.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return found
    for line in reversed([line for line in lines if line.endswith("}")]):
        event = json.loads(line)
        if event["kind"] == "Stopping":
            return "stopping"
        if event["kind"] == "Phase":
            return "waiting" if event["text"].startswith(WAITS) else "running"
    return found


WAITS = "waits for "
"""How the phase of a run begins that waits its turn."""


def ask_to_stop(run: RunDir, reason: str, *, now: bool = False) -> None:
    """Have the guard begin the stop ladder; asked again, or with `now`, it hurries."""
    rundir.append(run.requests, json.dumps({"do": "stop", "reason": reason, "now": now}) + "\n")


def stop(run: RunDir, reason: str) -> Iterator[str]:
    """Ask a run to stop and wait until it has; what there is to say, line by line.

    Raises TpunbError for a run that is lost.
    """
    before = state(run)
    if before not in ALIVE:
        yield ended(run)
        return
    ask_to_stop(run, reason)
    if before == "stopping":
        yield f"run {run.id} is being stopped already: what is left of its time to save is skipped"
    else:
        grace = read_spec(run).grace
        yield f"stopping run {run.id}: its ranks have {grace:g} s to save; stop it again to hurry"
    try:
        wait(run)
    except KeyboardInterrupt:
        raise TpunbError(f"run {run.id} is still being stopped; stop it again to hurry") from None
    yield ended(run)


def wait(run: RunDir) -> None:
    """Return once a run has ended, or is lost."""
    while state(run) in ALIVE:
        time.sleep(LOOK)


def ended(run: RunDir) -> str:
    """How a run ended, in a line. Raises TpunbError for one that is lost."""
    result = read_result(run)
    if result is None:
        raise TpunbError(lost(run))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result.ended))
    why = f" ({result.reason})" if result.reason else ""
    return f"run {run.id} has ended: {result.state}{why}, at {when}, after {result.duration:.1f} s"


def lost(run: RunDir) -> str:
    """What there is to say about a run that is lost."""
    return (
        f"run {run.id} is lost: its guard or its machine has ended without a result. "
        f"What it wrote until then is in {run.path}"
    )


def living(runs: Path, wanted: str | None) -> RunDir:
    """The run to act upon: of those that go on, the one whose id contains `wanted`, or the latest.

    Where none goes on, any run that fits, so that it can be said how it ended. Raises TpunbError
    if there is none, or more than one.
    """
    every = rundir.runs_in(runs)
    alive = [run for run in every if state(run) in ALIVE]
    if wanted is None:
        if not alive and every:
            raise TpunbError(f"no run in {runs} goes on; the latest: {_how(every[-1])}")
        return alive[-1] if alive else rundir.find(runs, None)
    theirs = runs / wanted
    if theirs.is_dir() and not os.access(theirs, os.X_OK, effective_ids=True):
        raise TpunbError(
            f"run {wanted} is another user's ({_owner(theirs)}): only they can follow or stop it"
        )
    matches = [run for run in alive if wanted in run.id]
    return matches[0] if len(matches) == 1 else rundir.find(runs, wanted)


def _how(run: RunDir) -> str:
    try:
        return ended(run)
    except TpunbError as error:
        return str(error)


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # a number without a name
        return str(path.stat().st_uid)
