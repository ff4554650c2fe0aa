"""`tpunb.on_log`: pass on the metrics of runs, for example to wandb or MLflow.

In the kernel, where it is usually called, callbacks get each step of the runs that the kernel
follows, reduced over ranks, in a thread of their own: a slow server delays nothing else. In a rank
they get the values that this rank logs. Standard library only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric
from tpunb.runs.metrics import SETTLED, MetricSeries, Point

Callback = Callable[[dict[str, float], int | None], object]

POLL_INTERVAL = 1.0
"""Seconds between two checks for steps that no other rank will log."""
PATIENCE = 10.0
"""Seconds that the end of a run waits for callbacks at most."""
_callbacks: dict[object, Callback] = {}
_of_call: list[Callback] = []
"""Those of `tpunb.launch(on_log=)`, whose errors are the call's."""
_passed_on: dict[tuple[Path, str], tuple[int, int]] = {}
"""The last attempt and step that this kernel has passed on, by run and metric."""


def on_log(callback: Callback | None) -> Callback | None:
    """Call `callback(values, step)` with the metrics of `tpunb.log`; None removes all callbacks.

        # tpu: skip
        import wandb
        wandb.init(project="digits")
        tpunb.on_log(wandb.log)        # or mlflow.log_metrics

    Call it in a cell that only the kernel runs: then the callback gets a dict of numbers for each
    step, reduced over all ranks as `tpunb.log` requested. If it is called in the train cell, the
    callback gets the values that this rank logs. `step` is None if `tpunb.log` was called without
    one in the same process. A function that is defined again, as when its cell runs again,
    replaces its former definition. Return the callback.

    An exception in a callback does not end a run; it is reported once.
    """
    if callback is None:
        _callbacks.clear()
        return None
    name = getattr(callback, "__qualname__", "")
    named = name and "<lambda>" not in name
    key: object = (getattr(callback, "__module__", ""), name) if named else callback
    _callbacks[key] = callback
    return callback


def forget() -> None:
    """Remove callbacks that cells above the train cell have set: the kernel has them too."""
    _callbacks.clear()


@contextmanager
def calling(callback: Callback | None) -> Iterator[None]:
    """A block in which `callback` is called as well; what it raises, `call` raises."""
    if callback is None:
        yield
        return
    _of_call.append(callback)
    try:
        yield
    finally:
        _of_call.remove(callback)


def call(values: Mapping[str, float], step: int | None) -> str:
    """Call all callbacks; return a description of their errors, '' if there are none."""
    for callback in [*_of_call]:
        callback(dict(values), step)
    problems = []
    for callback in [*_callbacks.values()]:
        try:
            callback(dict(values), step)
        except Exception as error:  # an error of the user's callback must not end a training
            name = getattr(callback, "__qualname__", type(callback).__qualname__)
            problems.append(f"tpunb.on_log: {name} failed: {type(error).__name__}: {error}")
    return "; ".join(problems)


class RunCallbacks:
    """Passes on the metrics of one run: `add` returns at once."""

    def __init__(self, run: RunDir, ranks: int) -> None:
        self._run = run.path
        self._series = MetricSeries(ranks, keep=False)
        self._queue: SimpleQueue[Metric | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # A run that is followed again is read from its beginning.
        self._before = {name: at for (path, name), at in _passed_on.items() if path == run.path}
        self.problem = ""
        """The first error; '' if there was none."""

    def add(self, metric: Metric) -> None:
        if self._thread is None:
            if not (_callbacks or _of_call):
                return
            # A daemon: a server that does not answer must not keep the kernel from ending.
            self._thread = threading.Thread(target=self._work, name="tpunb-on-log", daemon=True)
            self._thread.start()
        self._queue.put(metric)

    def close(self) -> None:
        """End the thread once it has passed on all metrics."""
        self._queue.put(None)

    def finish(self) -> None:
        """Close, and wait until all metrics are passed on, at most PATIENCE seconds."""
        self.close()
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                self.problem = self.problem or "tpunb.on_log: a callback is still running"

    def _work(self) -> None:
        over = False
        while not over:
            try:
                metric = self._queue.get(timeout=POLL_INTERVAL)
            except Empty:
                self._pass_on(self._series.settle(monotonic() - SETTLED))
                continue
            over = metric is None
            if metric is None or metric.attempt > self._series.attempt:
                self._pass_on(self._series.finish())
            if metric is not None:
                self._pass_on(self._series.add(metric))

    def _pass_on(self, points: Iterable[Point]) -> None:
        steps: dict[int, dict[str, float]] = {}
        for point in points:
            at = self._series.attempt, point.step
            if at > self._before.get(point.name, (-1, -1)):
                _passed_on[self._run, point.name] = at
                steps.setdefault(point.step, {})[point.name] = point.value
        for step in sorted(steps):
            problem = call(steps[step], step)
            self.problem = self.problem or problem
