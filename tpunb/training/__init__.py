"""Helpers for the cells of a training: `from tpunb.training import Accumulation`.

Each is small, optional, plain PyTorch on the outside, and the same in the kernel, in a rehearsal
and on a TPU. They are loaded when used, because most of them need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpunb.training.accumulation import Accumulation, Update
    from tpunb.training.gradients import optimizer_step
    from tpunb.training.inference import predict
    from tpunb.training.sharding import shard

_MODULES = {
    "Accumulation": "accumulation",
    "Update": "accumulation",
    "optimizer_step": "gradients",
    "predict": "inference",
    "shard": "sharding",
}
__all__ = ["Accumulation", "Update", "optimizer_step", "predict", "shard"]


def __getattr__(name: str) -> Any:
    # A module may not be named as what is in it: once imported, it would be found instead.
    if name not in _MODULES:
        raise AttributeError(f"module 'tpunb.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpunb.training.{_MODULES[name]}"), name)
