"""A rank's heartbeat: a few shared bytes that count what it has done.

The rank writes them, the supervisor and the kernel read them. Standard library only. Nothing
here can block a rank: counting is a write to memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypeVar

from tpunb.utils import files

_T = TypeVar("_T")

INTERVAL = 0.5
"""Seconds between two looks at torch_xla's counters (80 µs each, measured)."""
_FORMAT = struct.Struct("<11Q")
SIZE = _FORMAT.size
_ACTIVITY = struct.Struct("<Q"), 9 * 8
_INPUT = struct.Struct("<Q"), 10 * 8
_OLDEST = 7 * 8
"""Bytes of the heartbeats of earlier versions, which had the first counts only."""

Counts = tuple[int, int, int, int, int]
"""Steps, compilations begun, compilations ended, nanoseconds of these, programs executed."""


@dataclass
class Heartbeat:
    """Counts that only grow."""

    train: int = 0
    """1 once the train cell has begun."""
    collectives_begun: int = 0
    collectives_ended: int = 0
    steps: int = 0
    """`torch_xla.sync()` and what calls it (torch_xla's counter MarkStep)."""
    compilations_begun: int = 0
    compilations_ended: int = 0
    compile_nanoseconds: int = 0
    """Of the compilations that have ended."""
    writes_begun: int = 0
    """Of checkpoints and values for the kernel: to a file, a disk, a bucket."""
    writes_ended: int = 0
    activity: int = 0
    """Whatever else shows that the rank goes on: batches of `tpunb.track`, calls of `tpunb.log`,
    programs that were executed."""
    input_nanoseconds: int = 0
    """In which the loop waited for the next batch of a DataLoader or MpDeviceLoader."""

    @property
    def compiling(self) -> bool:
        """True while XLA compiles a program, which may take many minutes."""
        return self.compilations_begun > self.compilations_ended

    @property
    def writing(self) -> bool:
        """True while the rank waits for a file system, which may be slow, or far away."""
        return self.writes_begun > self.writes_ended

    @property
    def waiting(self) -> bool:
        """True while the rank waits for other ranks in a collective."""
        return self.collectives_begun > self.collectives_ended

    def pack_into(self, memory: bytearray | memoryview | object) -> None:
        """Write the counts into the memory that readers see."""
        _FORMAT.pack_into(memory, 0, *astuple(self))  # type: ignore[arg-type]


def read_heartbeat(path: Path | str) -> Heartbeat | None:
    """The present counts of a rank; None before it has written any."""
    try:
        data = files.read_start(path, SIZE + 1)
    except (FileNotFoundError, PermissionError):
        return None
    if len(data) < _OLDEST:
        return None
    return Heartbeat(*_FORMAT.unpack(data[:SIZE].ljust(SIZE, b"\0")))


class HeartbeatWriter:
    """Writes the heartbeat of this rank. `count` gives what torch_xla has counted."""

    def __init__(self, path: Path, count: Callable[[], Counts]) -> None:
        self._count = count
        self._heartbeat = Heartbeat()
        self._pid = os.getpid()
        self._watching = False
        self._reading = False
        self._counting = threading.Lock()
        self._last: Counts = (0, 0, 0, 0, 0)
        with open(path, "wb+") as file:
            # Written, not only made as long: without its block on a full disk, the first write to
            # the memory would end the process (SIGBUS).
            file.write(bytes(SIZE))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), SIZE)

    def _write(self) -> None:
        self._heartbeat.pack_into(self._memory)

    def begin_training(self) -> None:
        """The train cell begins."""
        self._heartbeat.train = 1
        self._write()

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """A block in which this rank waits for others."""
        self._heartbeat.collectives_begun += 1
        self._write()
        yield
        self._heartbeat.collectives_ended += 1
        self._write()

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """A block in which this rank waits for a file system."""
        self._heartbeat.writes_begun += 1
        self._write()
        try:
            yield
        finally:
            self._heartbeat.writes_ended += 1
            self._write()

    def note_activity(self) -> None:
        """Less than a µs: called for every batch."""
        if os.getpid() == self._pid:
            self._heartbeat.activity += 1
            form, offset = _ACTIVITY
            form.pack_into(self._memory, offset, self._heartbeat.activity)

    def read_input(self, read: Callable[[], _T]) -> _T:
        """What `read` returns, which the loop waits for: one loader inside another counts once.

        So do the threads of a loader: what they wait for is ready when the loop asks.
        """
        mine = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if self._reading or not mine:
            return read()
        self._reading, began = True, time.perf_counter_ns()
        try:
            return read()
        finally:
            self._reading = False
            self._heartbeat.input_nanoseconds += time.perf_counter_ns() - began
            form, offset = _INPUT
            form.pack_into(self._memory, offset, self._heartbeat.input_nanoseconds)

    @property
    def input_seconds(self) -> float:
        return self._heartbeat.input_nanoseconds / 1e9

    def watch_counters(self) -> None:
        """Follow torch_xla's counters from now on, in a thread.

        Not before the XLA runtime starts threads of its own: a process with one thread can be
        forked without a warning, by a DataLoader for example.
        """
        if not self._watching and os.getpid() == self._pid:
            self._watching = True
            threading.Thread(target=self._follow, name="tpunb-heartbeat", daemon=True).start()

    def _follow(self) -> None:
        while True:
            self._add_counts()
            _pause.wait(INTERVAL)

    def _add_counts(self) -> None:
        with self._counting:
            now = self._count()
            new = [b - a if b >= a else b for a, b in zip(self._last, now, strict=True)]
            self._last = now
            self._heartbeat.steps += new[0]
            self._heartbeat.compilations_begun += new[1]
            self._heartbeat.compilations_ended += new[2]
            self._heartbeat.compile_nanoseconds += new[3]
            self._heartbeat.activity += new[4]
            self._write()

    def flush(self) -> None:
        """Add what torch_xla has counted since the last look: no more comes."""
        if os.getpid() == self._pid:
            self._add_counts()


_pause = threading.Event()
_writer: HeartbeatWriter | None = None
"""Of this process, if it is a rank of a run; what is below does nothing in others."""


def start_writer(path: Path, count: Callable[[], Counts]) -> None:
    """Begin the heartbeat of this rank."""
    global _writer
    _writer = HeartbeatWriter(path, count)


def begin_training() -> None:
    """The train cell of this rank begins."""
    if _writer is not None:
        _writer.begin_training()


def complete_counts() -> None:
    """The cells of this rank have ended: complete its counts."""
    if _writer is not None:
        _writer.flush()


def collective() -> contextlib.AbstractContextManager[None]:
    """A block in which this process waits for other ranks."""
    return contextlib.nullcontext() if _writer is None else _writer.collective()


def storing() -> contextlib.AbstractContextManager[None]:
    """A block in which this process waits for a file system: to write, to copy, to list."""
    return contextlib.nullcontext() if _writer is None else _writer.storing()


def note_activity() -> None:
    """This rank goes on, though it may print nothing."""
    if _writer is not None:
        _writer.note_activity()


def read_input(read: Callable[[], _T]) -> _T:
    """What `read` returns: the next batch, which this rank waits for (1 µs besides)."""
    return read() if _writer is None else _writer.read_input(read)


def input_seconds() -> float:
    """Seconds in which the loops of this rank have waited for batches."""
    return 0.0 if _writer is None else _writer.input_seconds


def watch_counters() -> None:
    """The XLA runtime starts now: follow its counters."""
    if _writer is not None:
        _writer.watch_counters()
