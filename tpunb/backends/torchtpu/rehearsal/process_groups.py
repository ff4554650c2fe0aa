"""TorchTPU's backends of torch.distributed, "tpu_dist" and "tpu", for rehearsed tensors: gloo.

What torch_tpu's ProcessGroupTpu does not implement raises here as well (torch_tpu 0.2.0, from the
symbols of its library). Whether a TPU has ReduceOp.AVG, and objects in a group without gloo, could
not be found out: a rehearsal has them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpunb.backends.rehearsal.distributed import TensorKind, install_collectives
from tpunb.backends.torchtpu.rehearsal.device import to_cpu

BACKENDS = ("tpu_dist", "tpu")
MISSING = ("reduce_", "allreduce_coalesced_", "allgather_coalesced_", "recv_any_source_")


def tpu_tensors() -> TensorKind:
    """Rehearsed tensors. Call it when the device has been installed."""
    return TensorKind("PrivateUse1", torch.device("tpu"), to_cpu, is_tpu=True, missing=MISSING)


def install_process_groups() -> None:
    """Register both backends and the kernels of their collectives, once in a process.

    Nothing is compared between ranks before `install_rehearsal`.
    """
    if BACKENDS[0] in dist.Backend.backend_list:
        return
    for name in BACKENDS:
        dist.Backend.register_backend(name, _create_backend, devices=["tpu"])
    install_collectives(tpu_tensors())


def _create_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
