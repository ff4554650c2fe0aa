"""Whether a run still goes on: signs of life of its ranks, and how long there was none."""

from __future__ import annotations

import time
from pathlib import Path

from tpunb.beat import Beat, read
from tpunb.rundir import RunDir

LOOK = 0.5
"""Seconds between two looks at the ranks' pulses."""
WAITED = 15.0
"""Seconds in one collective after which it is told who waits in it for whom."""
TOLD = 3
"""How often: where it is meant (rank 0 evaluates after each epoch) it is no news any more."""


class Vigil:
    """Watches the ranks of one attempt for signs of life.

    A sign is a line, a metric, a finished step or collective of any rank, or a checkpoint that
    grows; and as long as a rank compiles, which may take many minutes, all are taken to be
    alive. With a `prelude` of their own nothing is expected of ranks before a train cell has
    begun. Without one it begins right after the fork, so a rank that does not come out of that
    (a library's handler for forks waits for a lock) is missed like any other.
    """

    def __init__(
        self, run: RunDir, attempt: int, ranks: int, patience: float, *, prelude: bool
    ) -> None:
        self._run = run
        self._prelude = prelude
        self._paths = [run.pulse(attempt, rank) for rank in range(ranks)]
        self._patience = patience
        self._beats: list[Beat | None] = []
        self._entered = [(0, time.monotonic())] * ranks
        """The collective that each rank has come to last, and when that was seen."""
        self._told: set[int] = set()
        self._files: list[int] = []
        self._next = 0.0
        self._last = time.monotonic()

    def sign(self) -> None:
        """A rank has written something."""
        self._last = time.monotonic()

    def hangs(self) -> bool:
        """Look, if it is time to; True once there was no sign for as long as patience lasts."""
        now = time.monotonic()
        if not self._patience or now < self._next:
            return False
        self._next = now + LOOK
        beats = [read(path) for path in self._paths]
        files = [_size(self._run.metrics)]
        if self._run.checkpoints.is_dir():
            files += [_size(path) for path in self._run.checkpoints.iterdir()]
        begun = [beat for beat in beats if beat is not None and beat.train]
        moved = beats != self._beats or files != self._files
        elsewhere = self._prelude and not begun
        if moved or elsewhere or any(beat.compiling for beat in begun):
            self._last = now
        for rank, beat in enumerate(beats):
            if beat is not None and beat.collectives_begun != self._entered[rank][0]:
                self._entered[rank] = (beat.collectives_begun, now)
        self._beats, self._files = beats, files
        return now - self._last > self._patience

    def waiting(self) -> tuple[list[int], list[int]] | None:
        """Ranks that have waited long in a collective, and those that they wait for; once for it.

        Of rehearsals only: on a TPU no collective is counted. A rank that compiles will come.
        """
        beats = dict(enumerate(self._beats))
        inside = {r: b for r, b in beats.items() if b and b.collectives_begun > b.collectives_ended}
        outside = {r: b for r, b in beats.items() if r not in inside}
        if not inside or not outside or any(b is None or b.compiling for b in outside.values()):
            return None
        first = min(inside, key=lambda rank: self._entered[rank][1])
        number, since = self._entered[first]
        if number in self._told or len(self._told) == TOLD or time.monotonic() - since < WAITED:
            return None
        self._told.add(number)
        return list(inside), list(outside)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
