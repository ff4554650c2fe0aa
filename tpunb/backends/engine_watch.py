"""Notices the first backward pass of a process. Imports torch only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class EngineWatch:
    """Stands in for torch's autograd engine, and calls `first` before the first backward pass.

    Every backward pass of this process goes through the engine's `run_backward`.
    """

    def __init__(self, first: Callable[[], object]) -> None:
        self._variable: Any = importlib.import_module("torch.autograd").Variable
        self._engine: Any = self._variable._execution_engine
        self._first = first
        self._variable._execution_engine = self

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        self.close()
        self._first()
        return self._engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Restore torch's engine."""
        if self._variable._execution_engine is self:
            self._variable._execution_engine = self._engine
