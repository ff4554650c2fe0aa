"""The watcher: waits until the machine is not needed any more, counts down, and stops it.

It ends when the order is taken back or carried out. It stops nothing while a run goes on, a cell
runs, or another process has the TPU; and Google Cloud must still say that the machine is this one.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tpunb import control, rundir
from tpunb.errors import SetupError
from tpunb.platforms import holders, stopping
from tpunb.platforms.stopping import Order, Status
from tpunb.rundir import RunDir

TRIES = 3
"""How often gcloud is asked to stop the machine."""
BY_HAND = ("interrupted in the notebook", "stopped with ")
"""How the reasons begin of runs that a person has stopped: who does that is here."""


def main() -> None:
    """The process: one argument, the folder of `stopping`."""
    place = Path(sys.argv[1])
    with stopping.alone(place) as alone:
        if alone:
            _watch(place)


def _watch(place: Path) -> None:
    given, quiet = 0.0, 0.0
    while (order := stopping.given(place)) is not None:
        now = time.monotonic()
        if order.since != given:
            given, quiet = order.since, now
        if kept := _by_hand(order):
            _end(place, order, Status("kept", kept))
        elif busy := why_not(place, order):
            quiet = now
            _tell(place, order, Status("waiting", busy))
        else:
            left = max(0.0, quiet + order.delay - now)
            _tell(place, order, Status("counting", "", left))
            if not left and (done := _stop(place, order)) is not None:
                _end(place, order, done)
        time.sleep(order.look)


def _tell(place: Path, order: Order, status: Status) -> None:
    with contextlib.suppress(OSError):  # a full disk must not keep the machine running
        rundir.write_json(place / "state.json", {**asdict(status), "vm": order.vm.name})


def _end(place: Path, order: Order, status: Status) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # first: who reads the state may look for the reason here
        print(when, order.vm.name, status.phase, status.why, flush=True)
    _tell(place, order, status)
    if stopping.given(place) == order:  # and not a newer one
        (place / "order.json").unlink()


def why_not(place: Path, order: Order) -> str:
    """What speaks against stopping now, in words; '' if nothing does."""
    runs = [run for path in order.runs for run in rundir.runs_in(Path(path))]
    if order.run is not None:
        runs.append(RunDir(order.run))
    ended = False
    for run in runs:
        if control.state(run) in control.ALIVE:
            return f"run {run.id} goes on"
        result = control.read_result(run)
        ended |= result is not None and result.ended >= order.since
    if order.idle is None and order.run is None and not ended:
        return "no run has ended since"
    known = stopping.kernels(place)
    for told in known.values():
        if told["busy"]:
            return f"a cell runs in {told['name']}"
    for holder in holders.look(Path(order.root)).holders:
        # Kernels that tell of themselves are idle; a rank that was left behind is no use.
        if holder.pid not in known and (holder.kind != "run" or holder.living):
            return f"{holder.describe()} has the TPU"
    return ""


def _by_hand(order: Order) -> str:
    """Whether the run that is waited for was stopped by a person."""
    result = control.read_result(RunDir(order.run)) if order.run is not None else None
    if result is None or result.state != "interrupted" or not result.reason.startswith(BY_HAND):
        return ""
    return f"run {result.dir.name} was {result.reason}: whoever did it decides"


def _stop(place: Path, order: Order) -> Status | None:
    """Stop it, if it is still what it was, and nothing has changed meanwhile: gcloud is slow."""
    failed = ""
    for attempt in range(TRIES):
        try:
            order.vm.check()
            if stopping.given(place) != order or why_not(place, order):
                return None
            order.vm.stop()
        except SetupError as error:
            failed = str(error)
            time.sleep(order.countdown / 2 if attempt < TRIES - 1 else 0)
        else:
            return Status("stopped")
    return Status("failed", failed)
