"""torch_xla's counters in this process: compilations, steps, tensors, values that were read.

Used for the heartbeat of ranks, the notes on recompilation, the report of `%%tpu_debug` and
`tpunb.training`. The functions used are torch_xla's public `torch_xla.debug.metrics`; the names of
the counters are its own (see `private_names`). Importing this module does not import torch_xla.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from tpunb.backends.xla import runtime
from tpunb.backends.xla.private_names import (
    CACHED_COMPILE,
    COMPILE_TIME,
    CREATE_TENSOR,
    EXECUTE_TIMES,
    GRAPH_SIZE,
    MARK_STEP,
    METRICS,
    READ_SCALAR,
    READ_TENSOR,
    UNCACHED_COMPILE,
)


class Counts(NamedTuple):
    """torch_xla's counters in this process at one moment."""

    compiled: int = 0
    started: int = 0
    """Programs started, whether compiled for this start or before."""
    read: int = 0
    """Values that were copied to the host."""
    fallbacks: int = 0
    """Operators that ran on the CPU because XLA has none."""


def read_counts() -> Counts:
    """The counts now; zeros before the runtime runs. Some µs: called twice per operation."""
    if not runtime.is_running():
        return Counts()
    metrics = _metrics()
    value = metrics.counter_value
    compiled = value(UNCACHED_COMPILE) or 0
    return Counts(
        compiled,
        compiled + (value(CACHED_COMPILE) or 0),
        (value(READ_TENSOR) or 0) + (value(READ_SCALAR) or 0),
        sum([value(name) or 0 for name in metrics.executed_fallback_ops() if name != READ_SCALAR]),
    )


def heartbeat_counts() -> tuple[int, int, int, int, int, int]:
    """Steps, compilations begun and ended, their nanoseconds, executions, and tensors created.

    A loop over a function of torch.compile executes a program in each round, and has no steps.
    torch_xla counts a compilation when it begins and times it when it ends (measured on 2.9:
    during one of 28 s they are 1 and 0). The user may reset all of them to 0.
    """
    metrics = _metrics()
    timed = metrics.metric_data(COMPILE_TIME)
    return (
        metrics.counter_value(MARK_STEP) or 0,
        compilations_begun(),
        timed[0] if timed else 0,
        int(timed[1]) if timed else 0,
        sum(executed[0] for name in EXECUTE_TIMES if (executed := metrics.metric_data(name))),
        _all_tensors(),
    )


def compilations_begun() -> int:
    """Compilations that have begun (a third of a µs)."""
    return _metrics().counter_value(UNCACHED_COMPILE) or 0


def compilations() -> int:
    """How many programs XLA has compiled in this process; 0 without torch_xla.

    `torch_xla.debug.metrics.clear_all()` resets it. A compilation in the background counts once
    it has ended.
    """
    timed = _metrics().metric_data(COMPILE_TIME) if METRICS in sys.modules else None
    return int(timed[0]) if timed else 0


def compile_seconds() -> float:
    """Seconds of the compilations that have ended."""
    timed = _metrics().metric_data(COMPILE_TIME)
    return float(timed[1]) / 1e9 if timed else 0.0


def graph_size() -> int:
    """Operations of the program that was started last; 0 if there was none."""
    sizes = _metrics().metric_data(GRAPH_SIZE)
    return int(sizes[2][-1][1]) if sizes and sizes[2] else 0


_own_tensors = 0


def tensors_created() -> int:
    """XLA tensors that operations have created; equal steps create equally many."""
    return _all_tensors() - _own_tensors


@contextlib.contextmanager
def creating_own_tensors() -> Iterator[None]:
    """A block in which tpunb itself creates tensors: they do not count."""
    global _own_tensors
    before = _all_tensors()
    try:
        yield
    finally:
        _own_tensors += _all_tensors() - before


def _all_tensors() -> int:
    return _metrics().counter_value(CREATE_TENSOR) or 0


def _metrics() -> Any:
    return sys.modules.get(METRICS) or importlib.import_module(METRICS)
