"""Signs of life of a rank: a few shared bytes that it writes and the guard reads.

Standard library only: the guard imports this too. Nothing here can block a rank: counting is a
write to memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tpunb import beat
from tpunb.beat import Beat

INTERVAL = 0.5
"""Seconds between two looks at torch_xla's counters (80 µs each, measured)."""


Counts = tuple[int, int, int, int]
"""Steps, compilations begun, compilations ended, nanoseconds of these."""


class Pulse:
    """A rank's own end. `count` gives what torch_xla has counted."""

    def __init__(self, path: Path, count: Callable[[], Counts]) -> None:
        self._count = count
        self._beat = Beat()
        self._pid = os.getpid()
        self._watching = False
        self._looking = threading.Lock()
        self._last: Counts = (0, 0, 0, 0)
        with open(path, "wb+") as file:
            file.truncate(beat.SIZE)
            self._memory = mmap.mmap(file.fileno(), beat.SIZE)

    def _write(self) -> None:
        self._beat.pack_into(self._memory)

    def begin(self) -> None:
        """The train cell begins."""
        self._beat.train = 1
        self._write()

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """A block in which this rank waits for others."""
        self._beat.collectives_begun += 1
        self._write()
        yield
        self._beat.collectives_ended += 1
        self._write()

    def watch(self) -> None:
        """Follow torch_xla's own counters from now on, in a thread.

        Not before the XLA runtime starts threads of its own: a process with one thread can be
        forked without a warning, by a DataLoader for example.
        """
        if not self._watching and os.getpid() == self._pid:
            self._watching = True
            threading.Thread(target=self._follow, name="tpunb-pulse", daemon=True).start()

    def _follow(self) -> None:
        while True:
            self._look()
            _pause.wait(INTERVAL)

    def _look(self) -> None:
        with self._looking:
            now = self._count()
            new = [b - a if b >= a else b for a, b in zip(self._last, now, strict=True)]
            self._last = now
            self._beat.steps += new[0]
            self._beat.compilations_begun += new[1]
            self._beat.compilations_ended += new[2]
            self._beat.compile_nanoseconds += new[3]
            self._write()

    def settle(self) -> None:
        """Count what has happened since the last look, or at all: no more comes."""
        if os.getpid() == self._pid:
            self._look()


_pause = threading.Event()
_mine: Pulse | None = None


def start(path: Path, count: Callable[[], Counts]) -> None:
    """In a rank: begin to give signs of life."""
    global _mine
    _mine = Pulse(path, count)


def begin() -> None:
    """The train cell of this rank begins."""
    if _mine is not None:
        _mine.begin()


def settle() -> None:
    """The cells of this rank have ended: its counts are whole."""
    if _mine is not None:
        _mine.settle()


def collective() -> contextlib.AbstractContextManager[None]:
    """A block in which this process waits for other ranks; counts only in a rank of a run."""
    return contextlib.nullcontext() if _mine is None else _mine.collective()


def watch() -> None:
    """XLA's runtime starts now: follow its counters, in a rank of a run."""
    if _mine is not None:
        _mine.watch()
