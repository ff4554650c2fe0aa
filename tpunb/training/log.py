"""`tpunb.log`: metrics of a training loop, without stopping it.

Numbers are written at once, or within GATHER seconds when they come fast. The value of a lazy
XLA tensor is not known when it is logged: it is kept, and read after the step's graph was
started (`torch_xla.sync()`, the loader's next batch), by a thread of its own. So logging
neither starts a computation nor waits for one.

torch is used where it is imported already, and never imported here.
"""

from __future__ import annotations

import atexit
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

from tpunb import spmd
from tpunb.records import MEAN, REDUCTIONS, RESERVED
from tpunb.rundir import RunDir, append

GATHER = 0.05
"""Seconds between two writes of records that come faster than that."""


def log(step: int | None = None, *, reduce: str | Mapping[str, str] = MEAN, **values: Any) -> None:
    """Record metrics: `tpunb.log(step, loss=loss, accuracy=0.91)`.

    A value is a number, a numpy scalar or a tensor of one element. In a run they go to the
    run's `metrics.jsonl`; elsewhere one line is printed, under torchrun by rank 0 only.

    `reduce`: how the values that ranks log for the same step become one: 'mean', 'sum', 'min'
    or 'max'; for some metrics only: `reduce={"tokens": "sum"}`. Each rank writes its own, and
    whoever reads them reduces, so no rank waits for another, and any of them may log.

    Raises TypeError for a value that is no number, ValueError for a tensor of several elements,
    for a name that the records use themselves (`rank`, `attempt`, `time`) and for an unknown
    reduction.
    """
    record = Record(time.time(), _step(step))
    if not values:
        raise TypeError("tpunb.log needs at least one value: tpunb.log(step, loss=loss)")
    for name, value in values.items():
        if name in RESERVED:
            raise ValueError(
                f"tpunb.log records {name!r} itself: choose another name, {name}_ for example"
            )
        record.add(name, value)
    record.reduce = _reductions(reduce, values)
    _book().add(record)


def _reductions(asked: str | Mapping[str, str], values: Mapping[str, Any]) -> dict[str, str]:
    """How each metric is reduced, where it is not the mean."""
    if asked == MEAN:
        return {}
    every = dict.fromkeys(values, asked) if isinstance(asked, str) else dict(asked)
    for name, how in every.items():
        if how not in REDUCTIONS:
            known = ", ".join(map(repr, REDUCTIONS))
            raise ValueError(f"tpunb.log: reduce={how!r} is not known for {name}: use {known}")
        if name not in values:
            raise ValueError(f"tpunb.log: reduce names {name}, which this call does not log")
    return {name: how for name, how in every.items() if how != MEAN}


def flush(sync: bool = True, timeout: float | None = None) -> None:
    """Wait until everything that was logged is written.

    What still waits for its step is computed now, or with `sync=False` (after a failure, when
    computing may hang) left out. `timeout`: seconds to wait at most.
    """
    if _current is not None:
        _current.flush(sync, timeout)


@dataclass
class Record:
    """One call of `log`."""

    time: float
    step: int | None
    values: dict[str, Any] = field(default_factory=dict)
    """Floats, and tensors where `lazy`."""
    lazy: set[str] = field(default_factory=set)
    reduce: dict[str, str] = field(default_factory=dict)
    """How values of several ranks become one, where it is not the mean."""

    def add(self, name: str, value: Any) -> None:
        """Check and keep a value."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"tpunb.log: {name} is a tensor of shape {list(value.shape)}, not a single "
                    f"number: log {name}.mean(), for example"
                )
            if value.is_complex():
                raise TypeError(f"tpunb.log: {name} is complex: log its abs()")
            if value.device.type == "xla":
                value = spmd.plain(value)
                self.values[name] = _snapshot(value)
                self.lazy.add(name)
                return
            value = value.detach().item()
        elif numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
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

    def read(self) -> None:
        """Replace tensors by their values. Waits until they are computed."""
        for name in self.lazy:
            try:
                self.values[name] = float(self.values[name].cpu().item())
            except RuntimeError as error:
                self.values[name] = float("nan")
                _complain(f"the value of {name} (step {self.step}) is lost", error)
        self.lazy = set()


def _step(step: int | None) -> int | None:
    if step is None:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(step, torch.Tensor):
        # operator.index would start the computation of a lazy tensor and wait for it.
        raise TypeError("tpunb.log: step must be an int, not a tensor")
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"tpunb.log: step must be an int, not {type(step).__name__}") from None


def _snapshot(tensor: Any) -> Any:
    """A tensor that holds the value that `tensor` has now, without computing it.

    Private names, checked on torch 2.8 and 2.9: below an XLA tensor that a program sees is the
    one of the computation (`_from_functional_tensor`), which changes in place do not reach.
    A clone would do as well, but be one more output of the step's graph: a second compilation
    where only some steps are logged. It is made where the tensor was changed in place before,
    as in `total += loss`: its memory is reused by the next change. (Tensors of inference mode
    do not say whether they were.)
    """
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    if not torch._is_functional_tensor(tensor):
        return tensor.clone()
    if tensor.is_inference() or tensor._version > 0:
        tensor = tensor.clone()
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


class Book(ABC):
    """Records in the order of their calls; those with lazy values wait for the step marker."""

    def __init__(self) -> None:
        self._waiting: list[Record] = []
        self._order = threading.RLock()

    def add(self, record: Record) -> None:
        """Take a record. One without lazy values goes on at once, unless others wait."""
        with self._order:
            if record.lazy:
                # One closure for each, not for the first: if another closure raises,
                # torch_xla drops those behind it. The first that runs takes all records.
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
        """See the function `flush`."""
        if self._waiting and sync:
            sys.modules["torch_xla"].sync()
        with self._order:
            records, self._waiting = [r for r in self._waiting if not r.lazy], []
            if records:
                self.deliver(records)

    @abstractmethod
    def deliver(self, records: list[Record]) -> None:
        """Write records whose values can be read."""


class Printed(Book):
    """Outside a run: one line for each record."""

    def deliver(self, records: list[Record]) -> None:
        for record in records:
            record.read()
            step = [] if record.step is None else [f"step {record.step}"]
            shown = [f"{name} {_number(value)}" for name, value in record.values.items()]
            print(" · ".join(step + shown), flush=True)


class Silent(Book):
    """Under torchrun, outside a run: ranks other than 0."""

    def add(self, record: Record) -> None:
        """Drop it: rank 0 prints for all."""

    def deliver(self, records: list[Record]) -> None:
        """There are none."""


class Written(Book):
    """In a rank: lines of the run's `metrics.jsonl`.

    The first record after a pause is written by the caller, the others by a thread that
    gathers them: so that ten thousand a second cost little, and one is seen at once.
    """

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        super().__init__()
        self._path = path
        self._origin = {"rank": rank, "attempt": attempt}
        self._queue: list[Record] = []
        lock = threading.RLock()
        self._change = threading.Condition(lock)
        # A thread that gathers is not to be woken by each record: that would cost more than all
        # else (a switch of threads, and the interpreter's lock taken from the training).
        self._hurry = threading.Condition(lock)
        self._busy = False
        self._flushing = False
        self._last = 0.0
        self._thread: threading.Thread | None = None

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
            self._flushing = True  # from here on nobody gathers, and no thread is started
            self._hurry.notify_all()
        super().flush(sync, timeout)
        with self._change:
            self._change.wait_for(lambda: not self._busy, timeout)
            self._flushing = False

    def _work(self) -> None:
        while True:
            with self._change:
                self._busy = bool(self._queue)
                self._change.notify_all()
                self._change.wait_for(lambda: bool(self._queue))
                records, self._queue = self._queue, []
            self._write(records)
            with self._change:
                self._hurry.wait_for(lambda: self._flushing, GATHER)

    def _write(self, records: Sequence[Record]) -> None:
        for record in records:
            record.read()
        try:
            append(self._path, "".join(self._line(record) for record in records))
        except OSError as error:
            _complain(f"{len(records)} records could not be written to {self._path}", error)
        self._last = time.monotonic()

    def _line(self, record: Record) -> str:
        how = {"reduce": record.reduce} if record.reduce else {}
        row = {**self._origin, "step": record.step, "time": record.time, **how, **record.values}
        return json.dumps(row) + "\n"


_current: Book | None = None
_complaints: set[str] = set()


def _book() -> Book:
    """Where this process's records go."""
    global _current
    if _current is None:
        rank, run = os.environ.get("RANK"), os.environ.get("TPUNB_RUN")
        if run and rank is not None:
            attempt = int(os.environ.get("TPUNB_ATTEMPT", "0"))
            _current = Written(RunDir(run).metrics, int(rank), attempt)
            # For a rank that fails: nobody else flushes then.
            atexit.register(flush, sync=False, timeout=5.0)
        else:
            _current = Printed() if rank in (None, "0") else Silent()
    return _current


def _forget() -> None:
    """A forked process has none of the threads, and may be another rank."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_forget)


def _number(value: float) -> str:
    """'0.4123', '12', '23456.8'."""
    if abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return f"{value:.6g}" if abs(value) >= 1e4 else f"{value:.4g}"


def _complain(what: str, error: Exception) -> None:
    """A metric is not worth ending a training for; a line on stderr is, once for each kind."""
    kind = type(error).__name__
    if kind not in _complaints:
        _complaints.add(kind)
        print(f"tpunb.log: {what}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
