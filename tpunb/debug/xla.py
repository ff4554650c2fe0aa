"""Private names of torch_xla and torch that the report of `%%tpu_debug` stands on: all, and why.

Looked up in torch_xla 2.8 and 2.9. Everything else that is read is public
(`torch_xla.debug.metrics`, `torch.overrides`, the hooks of optimizers and modules); the names
of its counters are torch_xla's own, so they are here too.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

VERSIONS = ("2.8", "2.9")
METRICS = "torch_xla.debug.metrics"
"""Public; so are the functions of it that are called."""
STEP_MARKER = "_xla_step_marker"
"""Of torch_xla._XLAC: where torch_xla.sync(), xm.mark_step() and loaders end a step's program."""
INITIALIZED = "_xla_runtime_is_initialized"
"""Of torch_xla._XLAC: whether there is anything to read."""
REDUCING = ("reduce_gradients", "all_reduce")
"""Of torch_xla.core.xla_model, public: what a step calls before the optimizer's own."""
CLOSURES = "_run_step_closures"
"""The function of torch_xla.sync() that runs step closures: they may read values."""
COMPILED = "UncachedCompile"
KNOWN = "CachedCompile"
"""Programs that were started: compiled for it, and compiled before."""
COMPILE_TIME = "CompileTime"
"""Nanoseconds (2.9: metric_data gives samples, their sum, and the last of them)."""
GRAPH_SIZE = "TensorsGraphSize"
"""Operations of a program."""
TO_CPU = "xla::_to_cpu"
SCALAR = "aten::_local_scalar_dense"
"""Values that were read: of a tensor, and of a single number. torch_xla counts the second as if
it were an operator that it does not have."""


class Counts(NamedTuple):
    """What torch_xla has counted in this process at one moment."""

    compiled: int = 0
    started: int = 0
    """Programs, compiled before or for it."""
    read: int = 0
    """Values that came to the host."""
    fallen: int = 0
    """Operators that ran on the CPU because XLA has none."""


def running() -> bool:
    """Whether the XLA runtime of this process has been started."""
    xla = sys.modules.get("torch_xla")
    return xla is not None and bool(getattr(xla._XLAC, INITIALIZED)())


def counts() -> Counts:
    """Look (some µs: this is called twice for each operation). The runtime must be running."""
    met = sys.modules.get(METRICS) or importlib.import_module(METRICS)
    value = met.counter_value
    compiled = value(COMPILED) or 0
    return Counts(
        compiled,
        compiled + (value(KNOWN) or 0),
        (value(TO_CPU) or 0) + (value(SCALAR) or 0),
        sum([value(name) or 0 for name in met.executed_fallback_ops() if name != SCALAR]),
    )


def fallback_names() -> list[str]:
    """Operators that have run on the CPU so far."""
    return [name for name in _metrics().executed_fallback_ops() if name != SCALAR]


def compile_seconds() -> float:
    """Seconds of all compilations so far."""
    data = _metrics().metric_data(COMPILE_TIME)
    return float(data[1]) / 1e9 if data else 0.0


def graph_size() -> int:
    """Operations of the program that was started last; 0 if none was."""
    data = _metrics().metric_data(GRAPH_SIZE)
    return int(data[2][-1][1]) if data and data[2] else 0


def memory() -> tuple[int, int] | None:
    """Bytes of the device in use (the most, where it says so) and in all; None on a CPU."""
    xm: Any = sys.modules["torch_xla.core.xla_model"]
    try:
        told = xm.get_memory_info(sys.modules["torch_xla"].device())
    except RuntimeError:
        return None
    if "bytes_limit" not in told:
        return None
    return int(told.get("peak_bytes_used") or told["bytes_used"]), int(told["bytes_limit"])


def _metrics() -> Any:
    return importlib.import_module(METRICS)
