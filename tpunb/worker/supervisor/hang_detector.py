"""Detects hung runs: no activity from any rank for the whole time-out.

    active ── quiet for half the time-out: ──> measured ── quiet for the time-out: ──> hung
      ^  ^    measure the ranks' work          │  │        measure again, no work       │
      │  ╰── some rank has worked (accepted ───╯  │                                     │
      │      for MOST_WORK time-outs in a row)    │                                     │
      ╰───────────────── activity ────────────────┴─────────────────────────────────────╯

Activity is a line of output; anything that a heartbeat counts (a step, a collective, a metric, a
batch of tpunb.track); a running compilation or write; or, if ranks run the prelude themselves, that
no train cell has begun. Work is processor time, and bytes read or written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tpunb.runs.directory import RunDir
from tpunb.runs.heartbeat import Heartbeat, read_heartbeat
from tpunb.utils.processes import Work

INTERVAL = 0.5
"""Seconds between two reads of the ranks' heartbeats."""
MISSED = 5.0
"""A gap between two checks longer than this, in seconds, is not counted as silence: the supervisor
was stopped, and perhaps everything else with it."""
BUSY = 0.1
"""Processors that a computing rank uses on average, at least. A waiting rank uses none, or
hundredths if it polls."""
MOVED = 1_000_000
"""Bytes that a rank reads or writes, at least, while it copies files or sends them elsewhere."""
MOST_WORK = 10
"""Time-outs in a row for which work counts without activity: an endless loop works as well."""


class HangDetector:
    """Watches the ranks of one attempt.

    While a rank compiles, which may take many minutes, all ranks count as active. If ranks run
    the prelude themselves (`prelude`), nothing is expected of them before a train cell has begun.
    Otherwise the train cell begins right after the fork, so a rank that hangs in the fork (a
    library's fork handler waits for a lock) is noticed like any other. `timeout` is in seconds
    of `clock`; 0 means that no run is hung. `work` measures what each living rank has done so
    far; it is not called before half of the time-out has passed.
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
        self._hung = False
        """The result of the last check."""
        self._next = clock()
        self._last_activity = self._last_work = clock()
        self._measured: tuple[float, Mapping[int, Work]] | None = None
        """When the work was measured during this silence, and the result."""

    def note_activity(self) -> None:
        """Note that a rank has written something."""
        self._last_activity = self._last_work = self._clock()
        self._measured = None
        self._hung = False

    @property
    def silence(self) -> float:
        """Seconds since the last activity; work does not count."""
        return self._clock() - self._last_activity

    def is_hung(self) -> bool:
        """Check, if a check is due; True once there was no activity for the whole time-out."""
        now = self._clock()
        if now < self._next:
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
        self._beats = beats
        self._hung = self._is_idle(now)
        return self._hung

    def _is_idle(self, now: float) -> bool:
        """True if there was neither activity nor work for the whole time-out."""
        if not self._timeout or now - self._last_work < self._timeout / 2:
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
