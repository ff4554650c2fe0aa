"""Helpers for training loops: `from tpunb.training import Accumulation`.

Each is small, optional and takes plain PyTorch objects, and works the same in the kernel, in a
rehearsal and on a TPU. They are loaded on first use, because most of them need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpunb.training.gradients import Accumulation, Update, optimizer_step
    from tpunb.training.inference import predict
    from tpunb.training.masks import MaskedMean, masked_loss, masked_mean
    from tpunb.training.padding import Buckets, pad_images, pad_sequences
    from tpunb.training.precision import bf16, watch_sums
    from tpunb.training.resume import Position, TrainingState
    from tpunb.training.sharding import shard
    from tpunb.training.throughput import Throughput, training_flops

# A module may not have the name of a member: once imported, it would be found instead of that.
_MODULES = {
    "Accumulation": "gradients",
    "Buckets": "padding",
    "MaskedMean": "masks",
    "Position": "resume",
    "Throughput": "throughput",
    "TrainingState": "resume",
    "Update": "gradients",
    "bf16": "precision",
    "masked_loss": "masks",
    "masked_mean": "masks",
    "optimizer_step": "gradients",
    "pad_images": "padding",
    "pad_sequences": "padding",
    "predict": "inference",
    "shard": "sharding",
    "training_flops": "throughput",
    "watch_sums": "precision",
}
__all__ = [
    "Accumulation",
    "Buckets",
    "MaskedMean",
    "Position",
    "Throughput",
    "TrainingState",
    "Update",
    "bf16",
    "masked_loss",
    "masked_mean",
    "optimizer_step",
    "pad_images",
    "pad_sequences",
    "predict",
    "shard",
    "training_flops",
    "watch_sums",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tpunb.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpunb.training.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
