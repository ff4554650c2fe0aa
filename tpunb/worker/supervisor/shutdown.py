"""The shutdown sequence: SIGINT once, a grace period, SIGTERM, SIGKILL.

    SIGINT    to the ranks (or the runner, before there are any), once
      │         grace period, cut short when all of them are gone
    SIGTERM   to every process of the run but the runner, which ends after its ranks
      │         TERM_WAIT
    SIGKILL   to every process, again at each look until none is left

A state machine without waits of its own: the supervisor calls `advance` in its loop, so that
logs go on being read while ranks save.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable

from tpunb.utils import processes
from tpunb.utils.processes import Process

log = logging.getLogger(__name__)

TERM_WAIT = 0.4
"""Seconds between SIGTERM and SIGKILL: enough to run a handler, not to save anew."""


class ShutdownSequence:
    """Ends the processes of a run, one step after the other.

    `first` run the user's code and get the one SIGINT. `parent`, if it is not one of them, ends
    by itself after them, and is killed only if it does not: its children would go with it.
    `all_processes` lists those that must be gone in the end (asked again at each step: children
    may come late). `on_step` is called with the name of each signal when its step begins. `grace`
    and `term_wait` are in seconds of `clock`.
    """

    def __init__(
        self,
        first: Iterable[Process],
        all_processes: Callable[[], list[Process]],
        *,
        parent: Process | None = None,
        grace: float,
        on_step: Callable[[str], None],
        term_wait: float = TERM_WAIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = list(first)
        self._parent = None if parent in self._first else parent
        self._all_processes = all_processes
        self._on_step = on_step
        self._grace = grace
        self._term_wait = term_wait
        self._clock = clock
        self._next = "SIGINT"
        self._deadline = 0.0

    def skip_grace_period(self) -> None:
        """Skip what is left of the grace period."""
        self._grace = 0.0
        if self._next == "SIGTERM":
            self._deadline = float("-inf")

    def advance(self) -> bool:
        """Take the step that is due, if one is. True once every process is gone."""
        now = self._clock()
        if self._next == "SIGINT":
            if self._first:
                self._on_step("SIGINT")
            self._signal(self._first, signal.SIGINT)
            self._next, self._deadline = "SIGTERM", now + self._grace
            return False
        saving = [process for process in [*self._first, self._parent] if _alive(process)]
        if self._next == "SIGTERM" and saving and now < self._deadline:
            return False
        left = self._all_processes()
        if not left:
            return True
        if self._next == "SIGTERM":
            if saving:
                self._on_step("SIGTERM")
            self._signal([p for p in left if p != self._parent], signal.SIGTERM)
            self._next, self._deadline = "SIGKILL", now + self._term_wait
        elif now >= self._deadline:
            if self._next == "SIGKILL":
                self._on_step("SIGKILL")
                self._next = "SIGKILL again"
            # A process can be forked between the look and the kill: kill until none is left.
            self._signal(left, signal.SIGKILL)
        return False

    @staticmethod
    def _signal(targets: list[Process], number: signal.Signals) -> None:
        log.info("%s to %s", number.name, [process.pid for process in targets])
        for process in targets:
            processes.signal_and_continue(process, number)


def _alive(process: Process | None) -> bool:
    return process is not None and processes.is_alive(process)
