"""Helpers for the cells of a training: `from tpunb.training import Accumulation`.

Each is small, optional, plain PyTorch on the outside, and the same in the kernel, in a rehearsal
and on a TPU. They are loaded when used, because most of them need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpunb.training.accumulation import Accumulation, Update
    from tpunb.training.buckets import Buckets, choose_buckets
    from tpunb.training.counting import compilations
    from tpunb.training.filecache import FileCache
    from tpunb.training.gradients import optimizer_step
    from tpunb.training.inference import predict
    from tpunb.training.loading import LoaderCheck, Loading, check_loader
    from tpunb.training.loops import masked_while
    from tpunb.training.masks import MaskedMean, masked_loss, masked_mean
    from tpunb.training.padding import pad_images, pad_sequences
    from tpunb.training.position import Position
    from tpunb.training.precision import bf16, watch_sums
    from tpunb.training.resuming import TrainingState
    from tpunb.training.sharding import shard
    from tpunb.training.throughput import Throughput, training_flops
    from tpunb.training.weights import save_weights

_MODULES = {
    "Accumulation": "accumulation",
    "Buckets": "buckets",
    "FileCache": "filecache",
    "LoaderCheck": "loading",
    "Loading": "loading",
    "MaskedMean": "masks",
    "Position": "position",
    "Throughput": "throughput",
    "TrainingState": "resuming",
    "Update": "accumulation",
    "bf16": "precision",
    "check_loader": "loading",
    "choose_buckets": "buckets",
    "compilations": "counting",
    "masked_loss": "masks",
    "masked_mean": "masks",
    "masked_while": "loops",
    "optimizer_step": "gradients",
    "pad_images": "padding",
    "pad_sequences": "padding",
    "predict": "inference",
    "save_weights": "weights",
    "shard": "sharding",
    "training_flops": "throughput",
    "watch_sums": "precision",
}
__all__ = [
    "Accumulation",
    "Buckets",
    "FileCache",
    "LoaderCheck",
    "Loading",
    "MaskedMean",
    "Position",
    "Throughput",
    "TrainingState",
    "Update",
    "bf16",
    "check_loader",
    "choose_buckets",
    "compilations",
    "masked_loss",
    "masked_mean",
    "masked_while",
    "optimizer_step",
    "pad_images",
    "pad_sequences",
    "predict",
    "save_weights",
    "shard",
    "training_flops",
    "watch_sums",
]


def __getattr__(name: str) -> Any:
    # A module may not be named as what is in it: once imported, it would be found instead.
    if name not in _MODULES:
        raise AttributeError(f"module 'tpunb.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpunb.training.{_MODULES[name]}"), name)
