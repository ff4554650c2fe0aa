"""TorchTPU's backends of torch.distributed, "tpu_dist" and "tpu", for rehearsed tensors: gloo.

What torch_tpu's ProcessGroupTpu does not implement raises here as well (torch_tpu 0.2.0, from the
symbols of its library). Whether a TPU has ReduceOp.AVG, and objects in a group without gloo, could
not be found out: a rehearsal has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tpunb.backends.rehearsal import install
from tpunb.backends.rehearsal.distributed import CPU, TensorKind, install_collectives
from tpunb.backends.torchtpu.rehearsal.rehearsed_device import to_cpu

BACKENDS = ("tpu_dist", "tpu")
MISSING = ("reduce_", "allreduce_coalesced_", "allgather_coalesced_", "recv_any_source_")


def tpu_tensors() -> TensorKind:
    """Rehearsed tensors. Call it when the device has been installed."""
    missing = {operator: _refusing(operator) for operator in MISSING}
    return TensorKind("PrivateUse1", torch.device("tpu"), to_cpu, is_tpu=True, missing=missing)


def _refusing(operator: str) -> Callable[..., NoReturn]:
    """A kernel that raises what c10d::Backend raises for what a backend does not have."""

    def kernel(tensors: Any, group: Any, *args: Any, **options: Any) -> NoReturn:
        backend = dist.get_backend(dist.ProcessGroup.unbox(group))
        raise RuntimeError(f"Backend {backend} does not support {operator.strip('_')}")

    return kernel


def install_process_groups() -> None:
    """Register both backends and the kernels of their collectives, once in a process.

    Nothing is compared between ranks before `install_rehearsal`.
    """
    if BACKENDS[0] in dist.Backend.backend_list:
        return
    for name in BACKENDS:
        dist.Backend.register_backend(name, _create_backend, devices=["tpu"])
    install_collectives(tpu_tensors())
    _prepare_ddp()


def install_rehearsal(rank: int, world_size: int, **options: Any) -> None:
    """As `tpunb.backends.rehearsal.install.install_rehearsal`, also for tensors on "tpu".

    The rehearsed device must have been installed.
    """
    install_process_groups()
    install.install_rehearsal(rank, world_size, kinds=(CPU, tpu_tensors()), **options)


def _create_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    group = dist.ProcessGroupGloo(store, rank, size, timeout)
    # A rank that ends right after this closes its connections, which others may not have noticed
    # yet: "Gloo connectFullMesh failed […] Connection closed by peer".
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{member}" for member in range(size)], timeout)
    return group


class _WithoutTimes:
    """DDP's logger, without its warning in each rank that it does not measure times on a TPU."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        pass


def _prepare_ddp() -> None:
    """Say what DDP's "list index out of range" means, as early as its call; less of its noise."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(
        self: DistributedDataParallel,
        module: torch.nn.Module,
        device_ids: Any = None,
        *args: Any,
        **options: Any,
    ) -> None:
        numbers = _numbers(device_ids)
        of_tpu = any(parameter.device.type == "tpu" for parameter in module.parameters())
        if of_tpu and any(numbers):
            raise ValueError(
                f"DistributedDataParallel(device_ids={device_ids}) names tpu:{max(numbers)}, which "
                "does not exist: each rank sees its own core as tpu:0. Leave device_ids out"
            )
        original(self, module, device_ids, *args, **options)
        if of_tpu:
            self.logger = _WithoutTimes(self.logger)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _numbers(device_ids: Any) -> list[int]:
    devices = (torch.device("tpu", d) if isinstance(d, int) else d for d in device_ids or ())
    return [torch.device(device).index or 0 for device in devices]
