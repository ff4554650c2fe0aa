"""Watches torch's autograd engine for its first backward pass in this process.

Private name, checked on torch 2.8 and 2.9: `torch.autograd.Variable._execution_engine`, through
whose `run_backward` every backward pass goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import Variable

from tpunb.worker import pulse


class EngineWatch:
    """Stands in for the engine until `first` was called, right before the first backward pass."""

    def __init__(self, first: Callable[[], object]) -> None:
        self._engine: Any = Variable._execution_engine
        self._first = first
        Variable._execution_engine = self  # type: ignore[assignment]

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        self.close()
        self._first()
        return self._engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Give torch its engine back."""
        watching: Any = Variable._execution_engine
        if watching is self:
            Variable._execution_engine = self._engine


def start_xla_before_backward() -> None:
    """Start the XLA runtime before the first backward pass of this process, whatever its device.

    torch makes its queues at the first backward pass, one for each device known then. Measured
    with torch 2.9 and torch_xla 2.9, also without tpunb: if that pass is on the CPU and the XLA
    runtime has not started, every later one on an XLA tensor fails with an internal assertion
    (engine.cpp, device_ready_queues_).
    """

    def start() -> None:
        import torch_xla.runtime as xr

        xr.addressable_runtime_device_count()  # unlike torch_xla.device(), leaves SPMD open
        pulse.watch()

    EngineWatch(start)
