"""A run that a guard was told to run: until its turn comes it waits, and may be called off."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from typing import IO, Any

from tpunb.control import WAITS
from tpunb.events import Ended, Event, Note, Phase
from tpunb.models import RunResult
from tpunb.rundir import LineTail, RunDir
from tpunb.worker import outcome
from tpunb.worker.outcome import Observed, Stop, Why
from tpunb.worker.turns import Turn

LOOK = 0.2
"""Seconds between two looks at whether a device is free."""


class Job:
    """One order of the kernel. `device` names what only one run at a time may use, if any."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.dir = RunDir(order["dir"])
        self.env: dict[str, str] = order["env"]
        self.detached: bool = order["detached"]
        self.spec = self.dir.read_spec()
        self.problem = ""
        """Why the run folder does not hold everything; empty while it does."""
        self._ordered = time.time()
        self._requests = LineTail(self.dir.requests)
        self._stops = 0
        self._lock: IO[str] | None = None
        self._waits_for = ""
        self._looked = -LOOK
        self._holder: dict[str, Any] | None = None
        self._turn = self._draw(order["device"])

    def _emit(self, event: Event) -> None:
        """Tell of an event. On a full disk nothing can be told, and runs go on all the same."""
        try:
            self.dir.emit(event)
        except OSError as error:
            self.problem = self.problem or f"{self.dir.path}: {error.strerror}"

    def _draw(self, device: str | None) -> Turn | None:
        if device is None:
            return None
        try:
            return Turn(device, self.who())
        except OSError as error:
            self._emit(Note(f"runs cannot wait for each other on this machine: {error}"))
            return None

    def who(self) -> dict[str, Any]:
        """What others are told who wait for this run."""
        cores = f"{self.spec.spmd or self.spec.world_size} {self.spec.device} cores"
        return {"run": self.dir.id, "cores": cores, "since": self._ordered}

    def blocked(self) -> dict[str, Any] | None:
        """Who has the device now; None if it is this run's turn. Looks at it now and then."""
        if self._turn is not None and time.monotonic() - self._looked >= LOOK:
            self._holder = self._turn.holder()
            self._looked = time.monotonic()
        return self._holder

    def wait_for(self, who: dict[str, Any]) -> None:
        """Not yet: say for whom this run waits, and hold its lock, as a run that goes on."""
        if self._lock is None:
            self._lock = open(self.dir.lock, "w")  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        since = time.strftime("%H:%M", time.localtime(who["since"]))
        text = f"{WAITS}run {who['run']} ({who['cores']}, since {since})"
        if text != self._waits_for:
            self._waits_for = text
            self._emit(Phase(text))

    def begins(self) -> None:
        """Its turn has come: the lock is let go for the one who watches over the run now."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            self._emit(Phase("starting"))

    def stops(self) -> Iterator[tuple[str, bool]]:
        """The stops that others asked for since the last call: why, and whether to hurry."""
        for line in self._requests.read():
            request = _request(line)
            if request is not None:
                self._stops += 1
                yield str(request.get("reason", "")), bool(request.get("now")) or self._stops > 1

    def call_off(self, why: Why, reason: str) -> RunResult | None:
        """Write the result of a run that was stopped before its turn came.

        Returns it if it cannot be written.
        """
        now = time.time()
        seen = Observed(
            started=self._ordered,
            ended=now,
            exits=[],
            stop=Stop(why, reason, now),
            attempt=0,
            replicate=self.spec.replicate,
            cell=None,
        )
        result = outcome.compose(self.dir, self.spec, seen)
        unwritten = None
        try:
            self.dir.write_result(result)
        except OSError:
            unwritten = result
        self._emit(Phase(result.state))
        self._emit(Ended(result.state))
        self.close()
        return unwritten

    def close(self) -> None:
        """It is over: the next may have the device."""
        self._requests.close()
        if self._lock is not None:
            self._lock.close()
        if self._turn is not None:
            self._turn.leave()


def _request(line: str) -> dict[str, Any] | None:
    """A request, or None for a line that is none: the file is the user's, who may edit it."""
    try:
        request = json.loads(line)
    except ValueError:
        return None
    is_stop = isinstance(request, dict) and request.get("do") == "stop"
    return request if is_stop else None
