"""The shutdown sequence: SIGINT once, a grace period, SIGTERM, SIGKILL.

    SIGINT    once, to the ranks (to the runner, if there are no ranks yet)
      │         wait for the grace period, or until they and the runner are gone
    SIGTERM   to every process left but the runner, which ends after its ranks
      │         wait for TERM_WAIT
    SIGKILL   to every process left but the runner, repeated at each `advance`
      │         wait for PARENT_WAIT: the runner ends, or begins another attempt
    SIGKILL   to the runner
      │
    done      as soon as no process is left, after any step

A state machine that never waits itself: the supervisor calls `advance` in its loop, and keeps
reading logs while ranks save.
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
"""Seconds between SIGTERM and SIGKILL: enough to run a handler, not to save again."""
PARENT_WAIT = 30.0
"""Seconds that the runner has after its ranks: those of other hosts may still end."""


class ShutdownSequence:
    """Ends the processes of a run, step by step.

    The processes in `first` run the user's code and get the one SIGINT. `parent`, unless it is one
    of them, ends by itself after them and is killed only if it does not, because its children
    would die with it. `all_processes` lists the processes that must be gone in the end; it is
    called at each step, because new children may appear. `on_step` is called with the name of each
    signal when its step begins. `grace` and `term_wait` are in seconds of `clock`.
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
        self._parent_deadline: float | None = None
        self._patient = True

    def skip_grace_period(self) -> None:
        self._grace, self._patient = 0.0, False
        if self._next == "SIGTERM":
            self._deadline = float("-inf")

    def advance(self) -> bool:
        """Take the next step if it is due. True once every process is gone."""
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
            others = [process for process in left if process != self._parent]
            if self._parent_deadline is None or others:
                self._parent_deadline = now + PARENT_WAIT
            if self._patient and not others and now < self._parent_deadline:
                return False
            if self._next == "SIGKILL":
                self._on_step("SIGKILL")
                self._next = "SIGKILL again"
            # A process can be forked between listing and killing: kill until none is left.
            self._signal(others if self._patient and others else left, signal.SIGKILL)
        return False

    @staticmethod
    def _signal(targets: list[Process], number: signal.Signals) -> None:
        log.info("%s to %s", number.name, [process.pid for process in targets])
        for process in targets:
            processes.signal_and_continue(process, number)


def _alive(process: Process | None) -> bool:
    return process is not None and processes.is_alive(process)
