"""The stop ladder: SIGINT once, time to save, SIGTERM, SIGKILL, and a look after each step.

A state machine without waits of its own: the guard calls `climb` in its loop, so that logs
go on being read while ranks save.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

from tpunb.worker import processes
from tpunb.worker.processes import Process

TERM_WAIT = 0.4
"""Seconds between SIGTERM and SIGKILL: enough to run a handler, not to save anew."""


class Ladder:
    """Ends the processes of a run, one step after the other.

    `first` are those that run the user's code and get the one SIGINT. `parent`, if it is not
    one of them, ends by itself after them, and is killed only if it does not: with it would go
    its children. `everyone` says which processes must be gone in the end (asked again at each
    step: children may come late).
    `stepped` is told the name of each signal when its step begins.
    """

    def __init__(
        self,
        first: Iterable[Process],
        everyone: Callable[[], list[Process]],
        *,
        parent: Process | None = None,
        grace: float,
        stepped: Callable[[str], None],
    ) -> None:
        self._first = list(first)
        self._parent = None if parent in self._first else parent
        self._everyone = everyone
        self._stepped = stepped
        self._grace = grace
        self._next = "SIGINT"
        self._deadline = 0.0

    def hurry(self) -> None:
        """Skip what is left of the grace period."""
        self._grace = 0.0
        if self._next == "SIGTERM":
            self._deadline = 0.0

    def climb(self) -> bool:
        """Take the step that is due, if one is. True once everyone is gone."""
        now = time.monotonic()
        if self._next == "SIGINT":
            if self._first:
                self._stepped("SIGINT")
            for process in self._first:
                processes.end(process, signal.SIGINT)
            self._next, self._deadline = "SIGTERM", now + self._grace
            return False
        saving = [process for process in [*self._first, self._parent] if _alive(process)]
        if self._next == "SIGTERM" and saving and now < self._deadline:
            return False
        everyone = self._everyone()
        if not everyone:
            return True
        if self._next == "SIGTERM":
            if saving:
                self._stepped("SIGTERM")
            self._signal([p for p in everyone if p != self._parent], signal.SIGTERM)
            self._next, self._deadline = "SIGKILL", now + TERM_WAIT
        elif now >= self._deadline:
            if self._next == "SIGKILL":
                self._stepped("SIGKILL")
                self._next = "SIGKILL again"
            # A process can be forked between the look and the kill: kill until none is left.
            self._signal(everyone, signal.SIGKILL)
        return False

    @staticmethod
    def _signal(targets: list[Process], number: int) -> None:
        for process in targets:
            processes.end(process, number)


def _alive(process: Process | None) -> bool:
    return process is not None and processes.alive(process)
