"""Signs of life of a rank: a few shared bytes that it writes and the guard reads.

Standard library only: the guard imports this too. Nothing here can block a rank: counting is a
write to memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FORMAT = struct.Struct("<6Q")
INTERVAL = 0.5
"""Seconds between two looks at torch_xla's counters (80 µs each, measured)."""


@dataclass
class Beat:
    """What a rank has done so far. All are counts that only grow."""

    train: int = 0
    """1 once the train cell has begun."""
    collectives_begun: int = 0
    collectives_ended: int = 0
    steps: int = 0
    """`torch_xla.sync()` and what calls it (torch_xla's counter MarkStep)."""
    compilations_begun: int = 0
    compilations_ended: int = 0

    @property
    def compiling(self) -> bool:
        """Whether XLA compiles a program now, which may take many minutes."""
        return self.compilations_begun > self.compilations_ended


def read(path: Path) -> Beat | None:
    """The last beat of a rank; None before its first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return Beat(*_FORMAT.unpack(data)) if len(data) == _FORMAT.size else None


class Pulse:
    """A rank's own end. `count` gives steps, compilations begun and ended, from torch_xla."""

    def __init__(self, path: Path, count: Callable[[], tuple[int, int, int]]) -> None:
        self._count = count
        self._beat = Beat()
        self._pid = os.getpid()
        self._watching = False
        with open(path, "wb+") as file:
            file.truncate(_FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)

    def _write(self) -> None:
        _FORMAT.pack_into(self._memory, 0, *vars(self._beat).values())

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
        last = (0, 0, 0)
        while True:
            now = self._count()
            new = [b - a if b >= a else b for a, b in zip(last, now, strict=True)]
            last = now
            self._beat.steps += new[0]
            self._beat.compilations_begun += new[1]
            self._beat.compilations_ended += new[2]
            self._write()
            _pause.wait(INTERVAL)


_pause = threading.Event()
_mine: Pulse | None = None


def start(path: Path, count: Callable[[], tuple[int, int, int]]) -> None:
    """In a rank: begin to give signs of life."""
    global _mine
    _mine = Pulse(path, count)


def begin() -> None:
    """The train cell of this rank begins."""
    if _mine is not None:
        _mine.begin()


def collective() -> contextlib.AbstractContextManager[None]:
    """A block in which this process waits for other ranks; counts only in a rank of a run."""
    return contextlib.nullcontext() if _mine is None else _mine.collective()


def watch() -> None:
    """XLA's runtime starts now: follow its counters, in a rank of a run."""
    if _mine is not None:
        _mine.watch()
