"""`tpunb.log`: record metrics of a training loop without stopping it.

Numbers are written at once, or within GATHER seconds when they come fast. The value of a lazy
XLA tensor is not known when it is logged: the tensor is kept, and a background thread reads it
once the step's graph has been started (`torch_xla.sync()`, the loader's next batch). So logging
neither starts a computation nor waits for one.

torch is used if it is already imported; this module never imports it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import operator
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpunb.backends.xla import tensors
from tpunb.runs import callbacks, heartbeat
from tpunb.runs.directory import rank_of_run
from tpunb.runs.metrics import MEAN, REDUCTIONS, RESERVED
from tpunb.training.ranks import is_first
from tpunb.utils.files import append_lines
from tpunb.utils.modules import is_a
from tpunb.utils.text import number

GATHER = 0.05
"""Seconds between two writes when records come faster than that."""
RETRY = 1.0
"""Seconds between two attempts to write records while the disk is full."""
MOST_KEPT = 16_000_000
"""Bytes of unwritten records that are kept for the next attempt."""


def log(step: int | None = None, *, reduce: str | Mapping[str, str] = MEAN, **values: Any) -> None:
    """Record metrics: `tpunb.log(step, loss=loss, accuracy=0.91)`.

    A value is a number, a numpy scalar, or a tensor or array of one element. In a run, the call
    appends a line to the run's `metrics.jsonl`; elsewhere it prints a line, under torchrun on
    rank 0 only.

    `reduce`: how the ranks' values for a step are combined: 'mean', 'sum', 'min' or 'max', for
    all metrics of the call or by name, `reduce={"tokens": "sum"}`. Each rank writes its own
    values and readers combine them, so no rank waits for another, and not every rank must log.

    Raises TypeError for a value that is not a number, a step that is not an int, or a call
    without values; ValueError for a tensor of several elements, a reserved name (`rank`,
    `attempt`, `time`) or an unknown reduction.
    """
    record = Record(time.time(), _step(step))
    if not values:
        raise TypeError("tpunb.log needs at least one value: tpunb.log(step, loss=loss)")
    for name, value in values.items():
        if name in RESERVED:
            raise ValueError(
                f"tpunb.log: the name {name!r} is reserved: use another, for example {name}_"
            )
        record.add(name, value)
    record.reduce = _reductions(reduce, values)
    _writer().add(record)


def _reductions(reduce: str | Mapping[str, str], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the reduction of each metric that is not reduced to its mean."""
    if reduce == MEAN:
        return {}
    every = dict.fromkeys(values, reduce) if isinstance(reduce, str) else dict(reduce)
    for name, how in every.items():
        if how not in REDUCTIONS:
            known = ", ".join(map(repr, REDUCTIONS))
            raise ValueError(f"tpunb.log: unknown reduce={how!r} for {name}: use {known}")
        if name not in values:
            raise ValueError(f"tpunb.log: reduce names {name}, which this call does not log")
    return {name: how for name, how in every.items() if how != MEAN}


def flush_metrics(sync: bool = True, timeout: float | None = None) -> None:
    """Wait until everything that was logged is written.

    Values whose step has not started are computed now; with `sync=False` (after a failure, when
    computing may hang) they are dropped. `timeout`: seconds to wait at most.
    """
    if _current_writer is not None:
        _current_writer.flush(sync, timeout)


@dataclass
class Record:
    time: float
    step: int | None
    values: dict[str, Any] = field(default_factory=dict)
    """Floats, and tensors for names in `lazy`."""
    lazy: set[str] = field(default_factory=set)
    reduce: dict[str, str] = field(default_factory=dict)
    """The reductions of metrics that are not reduced to their mean."""

    def add(self, name: str, value: Any) -> None:
        if is_a(value, "torch", "Tensor"):
            if value.numel() != 1:
                raise ValueError(
                    f"tpunb.log: {name} is a tensor of shape {list(value.shape)}, not a single "
                    f"number: log {name}.mean(), for example"
                )
            if value.is_complex():
                raise TypeError(f"tpunb.log: {name} is complex: log its abs()")
            if value.device.type == "xla":
                self.values[name] = tensors.snapshot(tensors.unwrap_sharded(value))
                self.lazy.add(name)
                return
            value = value.detach().item()
        elif is_a(value, "numpy", "generic", "ndarray"):
            if value.size != 1:
                raise ValueError(
                    f"tpunb.log: {name} is an array of shape {list(value.shape)}, not a single "
                    f"number: log {name}.mean(), for example"
                )
            value = value.item()
        if not isinstance(value, (int, float)):
            raise TypeError(
                f"tpunb.log: {name} is {type(value).__name__}, not a number or a tensor of one "
                "element"
            )
        self.values[name] = float(value)

    def resolve(self) -> None:
        """Replace tensors with their values, waiting until they are computed."""
        for name in self.lazy:
            try:
                self.values[name] = float(self.values[name].cpu().item())
            except RuntimeError as error:
                self.values[name] = float("nan")
                _report_error(f"lost the value of {name} (step {self.step})", error)
        self.lazy = set()


def _step(step: int | None) -> int | None:
    if step is None:
        return None
    if is_a(step, "torch", "Tensor"):
        # operator.index would start the computation of a lazy tensor and wait for it.
        raise TypeError("tpunb.log: step must be an int, not a tensor")
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"tpunb.log: step must be an int, not {type(step).__name__}") from None


class MetricsWriter(ABC):
    """Delivers records in order; records with lazy values wait for the step marker.

    log() -> add() -> not lazy, and no record is waiting ------------> deliver()
                   -> lazy, or behind a lazy one: _waiting -> step --> deliver()
    """

    def __init__(self) -> None:
        self._waiting: list[Record] = []
        self._order = threading.RLock()

    def add(self, record: Record) -> None:
        """Take a record; deliver it at once unless it or an earlier record has lazy values."""
        with self._order:
            if record.lazy:
                # A closure for each record, not only for the first: if another closure raises,
                # torch_xla drops those after it. The first one that runs takes all records.
                xm: Any = sys.modules["torch_xla.core.xla_model"]
                xm.add_step_closure(self._step_is_running)
            if record.lazy or self._waiting:
                self._waiting.append(record)
            else:
                self.deliver([record])

    def _step_is_running(self) -> None:
        with self._order:
            records, self._waiting = self._waiting, []
            if records:
                self.deliver(records)

    def flush(self, sync: bool, timeout: float | None) -> None:
        if self._waiting and sync:
            sys.modules["torch_xla"].sync()
        with self._order:
            records, self._waiting = [r for r in self._waiting if not r.lazy], []
            if records:
                self.deliver(records)

    @abstractmethod
    def deliver(self, records: list[Record]) -> None:
        """Write records whose values can be read now."""


class ConsoleWriter(MetricsWriter):
    """Prints a line for each record; used outside a run, under torchrun in rank 0 only."""

    def add(self, record: Record) -> None:
        if is_first():
            super().add(record)

    def deliver(self, records: list[Record]) -> None:
        for record in records:
            record.resolve()
            step = [] if record.step is None else [f"step {record.step}"]
            values = [f"{name} {number(value)}" for name, value in record.values.items()]
            line = " · ".join(step + values)
            if "tqdm" in sys.modules:  # perhaps a bar of `track`: the line belongs above it
                from tqdm import tqdm

                tqdm.write(line)
                sys.stdout.flush()
            else:
                print(line, flush=True)
            _call_back(record)


class FileWriter(MetricsWriter):
    """Appends lines to the run's `metrics.jsonl`; used in ranks.

    The first record after a pause is written by the caller, the others by a thread that collects
    them: ten thousand records a second cost little, and a single one is visible at once. Records
    that cannot be written because the disk is full are written with a later record or at the end.
    """

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        super().__init__()
        self._path = path
        self._origin = {"rank": rank, "attempt": attempt}
        self._queue: list[Record] = []
        lock = threading.RLock()
        self._change = threading.Condition(lock)
        # The thread that collects must not be woken by each record: that would cost more than
        # everything else (a thread switch, and the GIL taken from the training).
        self._flush_now = threading.Condition(lock)
        self._busy = False
        self._flushing = False
        self._last = 0.0
        self._thread: threading.Thread | None = None
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._lost = 0
        """The number of records that were dropped because `MOST_KEPT` was reached."""
        self._retry = 0.0

    def add(self, record: Record) -> None:
        heartbeat.note_activity()
        super().add(record)

    def deliver(self, records: list[Record]) -> None:
        with self._change:
            quiet = time.monotonic() - self._last > GATHER
            at_once = quiet and not any(record.lazy for record in records)
            if not self._busy and (at_once or self._flushing):
                self._write(records)
                return
            self._queue += records
            self._busy = True
            self._change.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tpunb.log", daemon=True)
                self._thread.start()

    def flush(self, sync: bool, timeout: float | None) -> None:
        with self._change:
            self._flushing = True  # from now on nothing is collected and no thread is started
            self._flush_now.notify_all()
        super().flush(sync, timeout)
        with self._change:
            self._change.wait_for(lambda: not self._busy, timeout)
            self._flushing = False
            if self._unwritten and not self._busy:
                self._append()
            if not _reported and (lost := self._lost + len(self._unwritten)):
                _report("lost", f"log: {lost} records could not be written to {self._path}")

    def _work(self) -> None:
        while True:
            with self._change:
                self._busy = bool(self._queue)
                self._change.notify_all()
                self._change.wait_for(lambda: bool(self._queue))
                records, self._queue = self._queue, []
            try:
                self._write(records)
            except Exception as error:  # this thread must not end: `flush` waits for it
                _report_error(f"lost {len(records)} records", error)
            with self._change:
                self._flush_now.wait_for(lambda: self._flushing, GATHER)

    def _write(self, records: Sequence[Record]) -> None:
        for record in records:
            record.resolve()
            _call_back(record)
            line = self._line(record)
            if self._unwritten_bytes + len(line) > MOST_KEPT:
                self._lost += 1
                continue
            self._unwritten.append(line)
            self._unwritten_bytes += len(line)
        if time.monotonic() >= self._retry:
            self._append()
        self._last = time.monotonic()

    def _append(self) -> None:
        """Append the unwritten records; keep those for which the disk has no room."""
        data = b"".join(self._unwritten)
        try:
            written = append_lines(self._path, data)
            full = written < len(data)
        except OSError as error:
            written, full = 0, True
            _report_error(f"cannot write {len(self._unwritten)} records to {self._path}", error)
        rest = data[data.rfind(b"\n", 0, written) + 1 :]
        self._unwritten = rest.splitlines(keepends=True)
        self._unwritten_bytes = len(rest)
        self._retry = time.monotonic() + RETRY if full else 0.0
        heartbeat.note_lost_records(self._lost + len(self._unwritten))

    def _line(self, record: Record) -> bytes:
        how = {"reduce": record.reduce} if record.reduce else {}
        row = {**self._origin, "step": record.step, "time": record.time, **how, **record.values}
        return f"{json.dumps(row)}\n".encode()


_current_writer: MetricsWriter | None = None
_reported: set[str] = set()


def _writer() -> MetricsWriter:
    global _current_writer
    if _current_writer is None:
        if (this := rank_of_run()) is not None:
            _current_writer = FileWriter(this.run.metrics, this.rank, this.attempt)
            # For a rank that fails: nothing else flushes then.
            atexit.register(flush_metrics, sync=False, timeout=5.0)
        else:
            _current_writer = ConsoleWriter()
    return _current_writer


def _drop_writer() -> None:
    """Forget the writer in a forked process, which lacks its thread and may be another rank."""
    global _current_writer
    _current_writer = None


os.register_at_fork(after_in_child=_drop_writer)


def _call_back(record: Record) -> None:
    if problem := callbacks.call(record.values, record.step):
        _report("callback", problem.removeprefix("tpunb."))


def _report_error(message: str, error: Exception) -> None:
    _report(type(error).__name__, f"log: {message}: {str(error).partition(chr(10))[0]}")


def _report(kind: str, message: str) -> None:
    """Print one line on stderr for each kind of error: a lost metric must not end a training."""
    if kind not in _reported:
        # Standard error may be a file on the same full disk, and the user may have closed it.
        with contextlib.suppress(OSError, ValueError):
            print(f"tpunb.{message}", file=sys.stderr, flush=True)
            _reported.add(kind)
