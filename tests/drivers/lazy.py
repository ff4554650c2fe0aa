"""torch_xla's modules for functions that tests run in ranks: imported when they are first used.

Collecting tests imports no torch_xla, and the process from which ranks are forked has it already.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module that is imported when one of its names is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


torch_xla: Any = LazyModule("torch_xla")
xm: Any = LazyModule("torch_xla.core.xla_model")
xr: Any = LazyModule("torch_xla.runtime")
xf: Any = LazyModule("torch_xla.core.functions")
met: Any = LazyModule("torch_xla.debug.metrics")
