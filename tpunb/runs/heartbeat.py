"""A rank's heartbeat: a few shared bytes with counts of its activity.

The rank writes them; the supervisor and the kernel read them. Writing cannot block a rank: it is a
write to memory. Standard library only.
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
"""Seconds between two reads of torch_xla's counters (80 µs each, measured)."""
_FORMAT = struct.Struct("<14Q")
SIZE = _FORMAT.size
_ACTIVITY = struct.Struct("<Q"), 9 * 8
_INPUT = struct.Struct("<Q"), 10 * 8
_BACKWARD = struct.Struct("<Q"), 11 * 8

Counts = tuple[int, int, int, int, int, int]
"""Steps, compilations begun, compilations ended, nanoseconds compiling, programs executed, and
`Heartbeat.on_device`."""


@dataclass
class Heartbeat:
    """The counts of a rank; they only grow."""

    train: int = 0
    """1 once the train cell has begun."""
    collectives_begun: int = 0
    collectives_ended: int = 0
    steps: int = 0
    """Calls of `torch_xla.sync()`, direct or not (torch_xla's counter MarkStep)."""
    compilations_begun: int = 0
    compilations_ended: int = 0
    compile_nanoseconds: int = 0
    """Time spent in the compilations that have ended."""
    writes_begun: int = 0
    """Writes of checkpoints and values for the kernel, to a disk or a bucket."""
    writes_ended: int = 0
    activity: int = 0
    """Other activity: batches of `tpunb.track`, calls of `tpunb.log`, executed programs."""
    input_nanoseconds: int = 0
    """Time that the loop waited for batches of a DataLoader or MpDeviceLoader."""
    backward: int = 0
    """1 once a backward pass has begun, on any device."""
    on_device: int = 0
    """Tensors created on the device; without torch_xla, steps of optimizers with parameters there,
    since it has no such counter."""
    lost_records: int = 0
    """Records of `tpunb.log` that could not be written, as on a full disk."""

    @property
    def compiling(self) -> bool:
        """True while XLA compiles a program, which may take many minutes."""
        return self.compilations_begun > self.compilations_ended

    @property
    def writing(self) -> bool:
        """True while the rank waits for a file system, which may be slow or remote."""
        return self.writes_begun > self.writes_ended

    @property
    def waiting(self) -> bool:
        """True while the rank waits for other ranks in a collective."""
        return self.collectives_begun > self.collectives_ended

    def pack_into(self, memory: bytearray | memoryview | object) -> None:
        """Write the counts into the memory that readers see."""
        _FORMAT.pack_into(memory, 0, *astuple(self))  # type: ignore[arg-type]


def read_heartbeat(path: Path | str) -> Heartbeat | None:
    """Return the current counts of a rank; None before it has written any."""
    try:
        data = files.read_start(path, SIZE + 1)
    except (FileNotFoundError, PermissionError):
        return None
    if len(data) < SIZE:
        return None
    return Heartbeat(*_FORMAT.unpack(data[:SIZE]))


class HeartbeatWriter:
    """Writes the heartbeat of this rank. `count` returns torch_xla's counters."""

    def __init__(self, path: Path, count: Callable[[], Counts]) -> None:
        self._count = count
        self._heartbeat = Heartbeat()
        self._pid = os.getpid()
        self._watching = False
        self._reading = False
        self._counting = threading.Lock()
        self._last: Counts = (0, 0, 0, 0, 0, 0)
        with open(path, "wb+") as file:
            # Zeros are written, instead of only setting the length: if the file had no block on a
            # full disk, the first write to the memory would end the process (SIGBUS).
            file.write(bytes(SIZE))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), SIZE)

    def _write(self) -> None:
        self._heartbeat.pack_into(self._memory)

    def begin_training(self) -> None:
        self._heartbeat.train = 1
        self._write()

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Count a block in which this rank waits for others."""
        self._heartbeat.collectives_begun += 1
        self._write()
        yield
        self._heartbeat.collectives_ended += 1
        self._write()

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """Count a block in which this rank waits for a file system."""
        self._heartbeat.writes_begun += 1
        self._write()
        try:
            yield
        finally:
            self._heartbeat.writes_ended += 1
            self._write()

    def note_lost_records(self, count: int) -> None:
        if count != self._heartbeat.lost_records:
            self._heartbeat.lost_records = count
            self._write()

    def note_backward(self) -> None:
        if os.getpid() == self._pid:
            self._heartbeat.backward = 1
            form, offset = _BACKWARD
            form.pack_into(self._memory, offset, 1)

    def note_activity(self) -> None:
        """Count an activity. Takes less than 1 µs, because it is called for every batch."""
        if os.getpid() == self._pid:
            self._heartbeat.activity += 1
            form, offset = _ACTIVITY
            form.pack_into(self._memory, offset, self._heartbeat.activity)

    def timed_read(self, read: Callable[[], _T]) -> _T:
        """Call `read`, count the time that the loop waits for it, and return its result.

        A loader inside another one counts once, and threads of a loader do not count: their
        batches are ready when the loop needs them.
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

        It must not be called before the XLA runtime starts its own threads: a process with one
        thread can be forked without a warning, for example by a DataLoader.
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
            self._heartbeat.on_device += new[5]
            self._write()

    def flush(self) -> None:
        """Add torch_xla's counts since the last read, at the end of the rank."""
        if os.getpid() == self._pid:
            self._add_counts()


_pause = threading.Event()
_writer: HeartbeatWriter | None = None
"""The writer of this process if it is a rank; without it, the functions below do nothing."""


def start_writer(path: Path, count: Callable[[], Counts]) -> None:
    """Start the heartbeat of this rank."""
    global _writer
    _writer = HeartbeatWriter(path, count)


def begin_training() -> None:
    if _writer is not None:
        _writer.begin_training()


def complete_counts() -> None:
    """Complete the counts of this rank after its cells have ended."""
    if _writer is not None:
        _writer.flush()


def collective() -> contextlib.AbstractContextManager[None]:
    """Count a block in which this process waits for other ranks."""
    return contextlib.nullcontext() if _writer is None else _writer.collective()


def storing() -> contextlib.AbstractContextManager[None]:
    """Count a block in which this process waits for a file system: to write, copy or list."""
    return contextlib.nullcontext() if _writer is None else _writer.storing()


def note_activity() -> None:
    """Note that this rank is active, although it may print nothing."""
    if _writer is not None:
        _writer.note_activity()


def note_lost_records(count: int) -> None:
    """Note how many records of `tpunb.log` are not written so far."""
    if _writer is not None:
        _writer.note_lost_records(count)


def note_backward() -> None:
    """Note that this rank has begun its first backward pass."""
    if _writer is not None:
        _writer.note_backward()


def timed_read(read: Callable[[], _T]) -> _T:
    """Call `read` for the next batch, count the wait, and return the batch (costs 1 µs)."""
    return read() if _writer is None else _writer.timed_read(read)


def input_seconds() -> float:
    """Return the seconds that the loops of this rank have waited for batches."""
    return 0.0 if _writer is None else _writer.input_seconds


def watch_counters() -> None:
    """Follow torch_xla's counters; call it when the XLA runtime starts."""
    if _writer is not None:
        _writer.watch_counters()
