"""The XLA runtime of this process: whether it runs, how it starts, and where its steps end.

Imports neither torch nor torch_xla before a function needs it, because the kernel imports it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from tpunb.backends.engine_watch import EngineWatch
from tpunb.runs import heartbeat

Function = Callable[..., Any]


def is_running() -> bool:
    """True once this process has started its XLA runtime, with the first use of a device."""
    return running_module() is not None


def running_module() -> Any:
    """The module torch_xla if its runtime runs in this process, else None."""
    xla: Any = sys.modules.get("torch_xla")
    return xla if xla is not None and xla._XLAC._xla_runtime_is_initialized() else None


def device_memory() -> tuple[int, int] | None:
    """Bytes of the device in use (the peak, if known) and in all; None on a CPU."""
    xm: Any = sys.modules["torch_xla.core.xla_model"]
    try:
        info = xm.get_memory_info(sys.modules["torch_xla"].device())
    except RuntimeError:
        return None
    if "bytes_limit" not in info:
        return None
    return int(info.get("peak_bytes_used") or info["bytes_used"]), int(info["bytes_limit"])


# -- where steps end


def wrap_step_marker(
    wrap: Callable[[Function], Function], set_name: Callable[[Any, str, object], None] = setattr
) -> None:
    """Replace torch_xla's step marker: torch_xla.sync(), xm.mark_step() and loaders call it.

    `wrap` gets the marker and returns its replacement; `set_name` sets it, as
    `Replacements.set` does to restore it later.
    """
    xlac = _xlac()
    set_name(xlac, "_xla_step_marker", wrap(xlac._xla_step_marker))


def watch_steps(
    before: Callable[[], None],
    after: Callable[[], None],
    *,
    compiled: Callable[[], int],
    on_part_compiled: Callable[[], None],
) -> None:
    """For the rest of this process, call `before` and `after` around the marker of each step.

    `on_part_compiled` is called when `compiled()`, the number of compilations begun, has grown
    while a rehearsed collective computed a part of a step.
    """

    def wrap_marker(marker: Function) -> Function:
        def mark_step(*args: Any, **kwargs: Any) -> Any:
            before()
            result = marker(*args, **kwargs)
            after()
            return result

        return mark_step

    xlac = _xlac()
    compute = xlac._xla_sync_live_tensors

    def compute_part(*args: Any, **kwargs: Any) -> Any:
        begun = compiled()
        result = compute(*args, **kwargs)
        if compiled() != begun:
            on_part_compiled()
        return result

    wrap_step_marker(wrap_marker)
    xlac._xla_sync_live_tensors = compute_part


def start_before_backward() -> None:
    """Start the XLA runtime before the first backward pass of this process, on any device.

    torch creates its queues at the first backward pass, one per device known then. If that pass
    is on the CPU and the XLA runtime has not started, every later one on an XLA tensor fails with
    an internal assertion (engine.cpp, device_ready_queues_; measured with torch 2.9 and
    torch_xla 2.9, also without tpunb).
    """

    def start() -> None:
        xr = importlib.import_module("torch_xla.runtime")
        xr.addressable_runtime_device_count()  # unlike torch_xla.device(), leaves SPMD open
        heartbeat.watch_counters()
        heartbeat.note_backward()

    EngineWatch(start)


def _xlac() -> Any:
    return importlib.import_module("torch_xla")._XLAC
