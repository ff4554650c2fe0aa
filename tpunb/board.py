"""TensorBoard's event file of a run, written beside its metrics by whoever follows it.

`tensorboard --logdir runs` shows each run by its id, with one curve a metric: reduced over
ranks, so 256 of them are no more than one. It is written by a thread on this side, because ranks
never wait for each other's values, and because the library takes its time to import.
"""

from __future__ import annotations

import fcntl
import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import IO, Any

from tpunb import records
from tpunb.events import Metric
from tpunb.rundir import RunDir

PREFIX = "events"
"""What the library makes of it: 'events.out.tfevents.1700000000.host'."""
SETTLED = 5.0
"""Seconds after which a step is written though some ranks have not logged it, as where only
rank 0 does."""
EVERY = 1.0
"""Seconds between two writes to the file."""


@dataclass
class _Point:
    """A step of one metric, while its ranks log it."""

    how: str
    time: float
    since: float
    values: dict[int, float] = field(default_factory=dict)


class Board:
    """Takes the metrics of a run, and writes what is complete. Nothing here waits but `close`."""

    def __init__(self, run: RunDir, ranks: int) -> None:
        self._run, self._ranks = run, ranks
        self._queue: SimpleQueue[Metric | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.problem = ""
        """Why the file is not complete; empty while it is."""

    def add(self, metric: Metric) -> None:
        """Take what a rank has logged."""
        if self._thread is None:
            # No daemon: a kernel that ends right after its run lets it write the rest.
            self._thread = threading.Thread(target=self._work, name="tpunb-board")
            self._thread.start()
        self._queue.put(metric)

    def close(self) -> None:
        """No more will come. What is left is written in a moment."""
        if self._thread is not None:
            self._queue.put(None)

    def _work(self) -> None:
        try:
            with open(self._run.path / ".board.lock", "w") as lock:
                if _taken(lock):
                    return  # somebody else follows this run and writes
                for before in self._run.path.glob(f"{PREFIX}.out.tfevents.*"):
                    before.unlink()  # of somebody who did; this is all from the start
                _Curves(self._run, self._ranks).write(self._queue)
        except OSError as error:  # the disk is full, or the folder was removed
            self.problem = error.strerror or str(error)
        except Exception as error:  # the library, or protobuf below it, does not fit: it is told
            self.problem = f"{type(error).__name__}: {error}"


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


class _Curves:
    """The curves of one event file."""

    def __init__(self, run: RunDir, ranks: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._ranks = ranks
        self._file: Any = EventsWriter(str(run.path / PREFIX))
        self._waiting: dict[str, dict[int, _Point]] = {}
        self._calls: dict[tuple[str, int], int] = {}
        self._attempt = 0

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
                    self._settle(now - SETTLED)
                    self._file.flush()
                    flushed = now
            self._settle(time.monotonic())
        finally:
            self._file.close()

    def _take(self, metric: Metric) -> None:
        if metric.attempt > self._attempt:
            self._begin(metric)
        for name, value in metric.values.items():
            step = metric.step
            if step is None:  # its number among the calls of this rank
                step = self._calls.get((name, metric.rank), 0)
                self._calls[name, metric.rank] = step + 1
            how = metric.reduce.get(name, records.MEAN)
            points = self._waiting.setdefault(name, {})
            point = points.setdefault(step, _Point(how, metric.time, time.monotonic()))
            point.values[metric.rank] = value
            if len(point.values) == self._ranks:
                self._add(name, step, points.pop(step))

    def _settle(self, before: float) -> None:
        """Write the points that have waited since then."""
        for name, points in self._waiting.items():
            for step in [step for step, point in points.items() if point.since <= before]:
                self._add(name, step, points.pop(step))

    def _begin(self, metric: Metric) -> None:
        """Another attempt: what the last one wrote of its steps is not to be shown."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._settle(time.monotonic())
        self._attempt = metric.attempt
        if metric.step is not None:
            begins = SessionLog(status=SessionLog.START)
            self._file.write_event(
                Event(wall_time=metric.time, step=metric.step, session_log=begins)
            )

    def _add(self, name: str, step: int, point: _Point) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        value = records.reduced(point.how, point.values.values())
        self._file.write_event(Event(wall_time=point.time, step=step, summary=scalar(name, value)))
