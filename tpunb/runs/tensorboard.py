"""TensorBoard's event file of a run, written to its folder by the kernel that follows it.

`tensorboard --logdir runs` shows each run by its id, with one curve per metric, reduced over
ranks, and with its parameters as HParams. A thread of the kernel writes it, because ranks never
wait for each other's values and because importing tensorboardX takes long.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import threading
import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import IO, Any

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric
from tpunb.runs.metrics import SETTLED, MetricSeries, Point
from tpunb.runs.parameters import parameters
from tpunb.utils import files

PREFIX = "events"
"""tensorboardX makes 'events.out.tfevents.1700000000.host' of it."""
SET_BY_IMPORT = "CRC32C_SW_MODE"
"""A variable that tensorboardX 2.6 sets when it is imported. Left in the kernel's environment, it
would make preludes stale that were kept before."""
SET_BEFORE = SET_BY_IMPORT in os.environ
"""Whether the kernel had it before this."""
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
        """Take what a rank has logged."""
        if self._thread is None:
            # Not a daemon: a kernel that ends right after its run waits for the rest.
            self._thread = threading.Thread(target=self._work, name="tpunb-tensorboard")
            self._thread.start()
        self._queue.put(metric)

    def close(self) -> None:
        """No more metrics come. The thread writes what is left and ends."""
        if self._thread is not None:
            self._queue.put(None)

    def _work(self) -> None:
        try:
            lock_file = files.open_file(self._run.path / ".board.lock", os.O_WRONLY | os.O_CREAT)
            with open(lock_file, "w") as lock:
                if _is_locked(lock):
                    return  # another process follows this run and writes
                for older in self._run.path.glob(f"{PREFIX}.out.tfevents.*"):
                    older.unlink()  # of an earlier follower; this one starts at the first metric
                _EventFile(self._run, self._ranks).write(self._queue)
        except OSError as error:  # the disk is full, or the folder was removed
            self.problem = error.strerror or str(error)
        except Exception as error:  # tensorboardX and protobuf do not fit together: reported
            self.problem = f"{type(error).__name__}: {error}"


def import_writer() -> None:
    """Import tensorboardX, which takes a second or two, and leave the environment as it was."""
    importlib.import_module("tensorboardX.event_file_writer")
    importlib.import_module("tensorboardX.summary")
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

    tensorboardX's SummaryWriter would do, but for a full disk: its own thread ends there without
    a word, and the queue before it, once full, blocks whoever adds to it for good.
    """

    def __init__(self, run: RunDir, ranks: int) -> None:
        import_writer()
        from tensorboardX.event_file_writer import EventsWriter

        self._series = MetricSeries(ranks, keep=False)
        self._file: Any = EventsWriter(str(run.path / PREFIX))
        self._write_parameters(parameters(run))

    def _write_parameters(self, values: Mapping[str, Any]) -> None:
        """For the HParams page, which finds the runs' metrics by itself."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import hparams

        if values:
            _, start, _ = hparams(dict(values), {})
            self._file.write_event(Event(wall_time=time.time(), summary=start))

    def write(self, queue: SimpleQueue[Metric | None]) -> None:
        """Write what comes until None does."""
        flushed = 0.0
        over = False
        try:
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
        """Have TensorBoard drop this step and later ones of the attempt before."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        begins = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time, step=step, session_log=begins))

    def _add(self, points: list[Point]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for point in points:
            summary = scalar(point.name, point.value)
            self._file.write_event(Event(wall_time=point.time, step=point.step, summary=summary))
