"""Whether a run still goes on: how long its ranks have shown no activity.

activity: a line; anything that a heartbeat counts (a step, a collective, a metric, a batch of
          tpunb.track); a compilation or a write that goes on; or, with a prelude of their own,
          no train cell has begun
silence for half of the time-out ──> measure the work of the ranks' processes
silence longer than the time-out ──> measure again: a rank that has worked is taken to be
          active, up to MOST_WORK time-outs in a row; else is_hung
some ranks in a collective for LONG_WAIT, others not ──> long_wait, once for a collective
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tpunb.runs.directory import RunDir
from tpunb.runs.heartbeat import Heartbeat, read_heartbeat
from tpunb.utils.processes import Work

INTERVAL = 0.5
"""Seconds between two looks at the ranks' heartbeats."""
LONG_WAIT = 15.0
"""Seconds in one collective after which it is told which ranks wait for which."""
MOST_NOTES = 3
"""How often: where it is meant (rank 0 evaluates after each epoch) it is no news any more."""
MISSED = 5.0
"""Seconds without a look that are not counted: the supervisor was stopped, and perhaps all else."""
BUSY = 0.1
"""Processors that a rank uses, on average, if it computes. One that waits uses none, or hundredths
if it asks again and again whether something is there."""
MOVED = 1_000_000
"""Bytes that a rank reads or writes, at least, while it copies files or sends them elsewhere."""
MOST_WORK = 10
"""Time-outs in a row in which work alone counts: a loop without an end works as well."""


class HangDetector:
    """Watches the ranks of one attempt.

    While a rank compiles, which may take many minutes, all are taken to be active. With a
    `prelude` of their own nothing is expected of ranks before a train cell has begun. Without
    one it begins right after the fork, so a rank that does not come out of that (a library's
    handler for forks waits for a lock) is missed like any other. `timeout` is in seconds of
    `clock`; 0: no run is hung. `work` measures what each living rank has done so far; it is
    asked at the earliest after half of the time-out.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        ranks: Sequence[int],
        timeout: float,
        work: Callable[[], Mapping[int, Work]],
        *,
        prelude: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._prelude = prelude
        self._paths = {rank: run.heartbeat(attempt, rank) for rank in ranks}
        self._timeout = timeout
        self._work = work
        self._clock = clock
        self._beats: dict[int, Heartbeat | None] = {}
        self._entered = dict.fromkeys(ranks, (0, clock()))
        """The collective that each rank has come to last, and when that was seen."""
        self._noted: set[int] = set()
        self._hung = False
        """What the last look has said."""
        self._next = clock()
        self._last_activity = self._last_work = clock()
        self._measured: tuple[float, Mapping[int, Work]] | None = None
        """When the work was measured in this silence, and what it was."""

    def note_activity(self) -> None:
        """A rank has written something."""
        self._last_activity = self._last_work = self._clock()
        self._measured = None
        self._hung = False

    @property
    def silence(self) -> float:
        """Seconds since the last activity; work alone is none."""
        return self._clock() - self._last_activity

    def is_hung(self) -> bool:
        """Look, if it is time to; True once there was no activity for the whole time-out."""
        now = self._clock()
        if not self._timeout or now < self._next:
            return self._hung
        if (missed := now - self._next) > MISSED:
            self._last_activity += missed
            self._last_work += missed
            self._measured = None
        self._next = now + INTERVAL
        beats = {rank: read_heartbeat(path) for rank, path in self._paths.items()}
        begun = [beat for beat in beats.values() if beat is not None and beat.train]
        in_prelude = self._prelude and not begun
        if beats != self._beats or in_prelude or any(b.compiling or b.writing for b in begun):
            self.note_activity()
        for rank, beat in beats.items():
            if beat is not None and beat.collectives_begun != self._entered[rank][0]:
                self._entered[rank] = (beat.collectives_begun, now)
        self._beats = beats
        self._hung = self._is_idle(now)
        return self._hung

    def _is_idle(self, now: float) -> bool:
        """Whether there was neither activity nor work for the whole time-out."""
        if now - self._last_work < self._timeout / 2:
            return False
        if self._measured is None:
            self._measured = now, self._work()
            return False
        since, before = self._measured
        if now - self._last_work <= self._timeout or now - since < self._timeout / 2:
            return False
        if self.silence > MOST_WORK * self._timeout or not self._has_worked(before, now - since):
            return True
        self._last_work, self._measured = now, None
        return False

    def _has_worked(self, before: Mapping[int, Work], seconds: float) -> bool:
        after = self._work()
        return any(
            after[rank].seconds - work.seconds >= BUSY * seconds
            or after[rank].bytes - work.bytes >= MOVED
            for rank, work in before.items()
            if rank in after
        )

    def long_wait(self) -> tuple[list[int], list[int]] | None:
        """Ranks that have waited long in a collective, and those that they wait for; once for it.

        Of rehearsals only: on a TPU no collective is counted. A rank that compiles will come.
        """
        beats = self._beats
        inside = {r: b for r, b in beats.items() if b and b.collectives_begun > b.collectives_ended}
        outside = {r: b for r, b in beats.items() if r not in inside}
        if not inside or not outside or any(b is None or b.compiling for b in outside.values()):
            return None
        first = min(inside, key=lambda rank: self._entered[rank][1])
        number, since = self._entered[first]
        if number in self._noted or len(self._noted) == MOST_NOTES:
            return None
        if self._clock() - since < LONG_WAIT:
            return None
        self._noted.add(number)
        return list(inside), list(outside)
