"""Write the TensorBoard event file of a run to its folder, in the kernel that follows the run.

`tensorboard --logdir runs` shows each run by its id, with one curve per metric, reduced over
ranks. A thread of the kernel writes it, because ranks never wait for each other's values and
because importing tensorboardX takes long.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import socket
import threading
import time
from queue import Empty, SimpleQueue
from typing import IO, Any

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric
from tpunb.runs.metrics import SETTLED, MetricSeries, Point
from tpunb.utils import files

PREFIX = "events.out.tfevents."
"""The beginning of a file's name, as TensorBoard expects it; the time and the host follow."""
SET_BY_IMPORT = "CRC32C_SW_MODE"
"""A variable that tensorboardX 2.6 sets when it is imported. If it stayed in the kernel's
environment, it would make preludes stale that were kept before."""
SET_BEFORE = SET_BY_IMPORT in os.environ
"""True if the kernel had the variable before the import."""
EVERY = 1.0
"""Seconds between two writes to the file."""


class TensorBoardWriter:
    """Writes the metrics of a run in a thread of its own: `add` and `close` return at once."""

    def __init__(self, run: RunDir, ranks: int) -> None:
        self._run, self._ranks = run, ranks
        self._queue: SimpleQueue[Metric | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.problem = ""
        """Why the file is incomplete; empty if it is complete."""

    def add(self, metric: Metric) -> None:
        if self._thread is None:
            # Not a daemon: a kernel that ends right after its run must wait for the rest.
            self._thread = threading.Thread(target=self._work, name="tpunb-tensorboard")
            self._thread.start()
        self._queue.put(metric)

    def close(self) -> None:
        """Have the thread write the remaining metrics and end."""
        if self._thread is not None:
            self._queue.put(None)

    def _work(self) -> None:
        try:
            lock_file = files.open_file(self._run.path / ".board.lock", os.O_WRONLY | os.O_CREAT)
            with open(lock_file, "w") as lock:
                if _is_locked(lock):
                    return  # another process follows this run and writes
                for older in self._run.path.glob(f"{PREFIX}*"):
                    older.unlink()  # of an earlier follower; this one starts at the first metric
                _EventFile(self._run, self._ranks).write(self._queue)
        except OSError as error:  # the disk is full, or the folder was removed
            self.problem = error.strerror or str(error)
        except Exception as error:  # tensorboardX and protobuf do not fit together: reported
            self.problem = f"{type(error).__name__}: {error}"


def import_writer() -> None:
    """Import tensorboardX, which takes a second or two, without changing the environment."""
    importlib.import_module("tensorboardX.record_writer")
    if not SET_BEFORE:
        os.environ.pop(SET_BY_IMPORT, None)


def _is_locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


class _EventFile:
    """The curves of one event file.

    tensorboardX's SummaryWriter is not used because of full disks: its thread then ends silently,
    and its queue, once full, blocks all callers forever. Nor is its EventsWriter, which then does
    not close its file.
    """

    def __init__(self, run: RunDir, ranks: int) -> None:
        import_writer()
        from tensorboardX.record_writer import RecordWriter

        self._series = MetricSeries(ranks, keep=False)
        name = f"{PREFIX}{int(time.time())}.{socket.gethostname()}"
        self._file: Any = RecordWriter(str(run.path / name))

    def _write_event(self, time: float, **values: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time, **values).SerializeToString())

    def write(self, queue: SimpleQueue[Metric | None]) -> None:
        """Write metrics from the queue until None arrives."""
        flushed = 0.0
        over = False
        try:
            self._write_event(time.time(), file_version="brain.Event:2")
            while not over:
                try:
                    metric = queue.get(timeout=EVERY)
                    over = metric is None
                    if metric is not None:
                        self._take(metric)
                except Empty:
                    pass
                if (now := time.monotonic()) - flushed >= EVERY:
                    self._add(self._series.settle(now - SETTLED))
                    self._file.flush()
                    flushed = now
            self._add(self._series.finish())
        finally:
            self._file.close()

    def _take(self, metric: Metric) -> None:
        if metric.attempt > self._series.attempt:
            self._add(self._series.finish())
            if metric.step is not None:
                self._purge(metric.step, metric.time)
        self._add(self._series.add(metric))

    def _purge(self, step: int, time: float) -> None:
        """Make TensorBoard drop this step and later ones of the previous attempt."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self._write_event(time, step=step, session_log=SessionLog(status=SessionLog.START))

    def _add(self, points: list[Point]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        for point in points:
            # tensorboardX's `scalar` logs a warning for each value that is not finite.
            value = Summary.Value(tag=point.name.lstrip("/"), simple_value=point.value)
            summary = Summary(value=[value])
            self._write_event(point.time, step=point.step, summary=summary)
