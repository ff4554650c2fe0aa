"""Which chip of which host a rank has: what torch_xla is told before its TPU runtime starts.

torch_xla (2.8, 2.9; _internal/tpu.py) reads the slice's shape from the metadata server, or, where
TPU_SKIP_MDS_QUERY is set, from variables, and then sets those of one process and its chip. But it
keeps each that is set already (os.environ.setdefault), and some platforms set those of a process
that drives a whole host: LeaderWorkerSet (lws, pkg/utils/accelerators/tpu.go), KubeRay's webhook
on v7x, Kaggle ('local'). With them, ranks of one chip each never meet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PER_PROCESS = ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID")
"""Of one process among all: right where one process drives all chips of a host (SPMD)."""
_OF_HOST = {
    "TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
    "CLOUD_TPU_TASK_ID": "TPU_WORKER_ID",
}
"""Variables in which torch_xla first looks for a fact about hosts, and then writes one about this
process, each with the one in which it looks next."""

_worker: int | None = None


def changes(env: Mapping[str, str]) -> dict[str, str | None]:
    """What must be changed in `env` for torch_xla to give each process a chip; None: removed.

    What the removed variables say about hosts stays, in the variables for hosts: without a
    metadata server torch_xla reads it from there.
    """
    found: dict[str, str | None] = {name: None for name in (*PER_PROCESS, *_OF_HOST) if name in env}
    if env.get("TPU_SKIP_MDS_QUERY"):
        for name, of_host in _OF_HOST.items():
            if name in env and env.get(of_host) != env[name]:
                found[of_host] = env[name]
    return found


def take_chip(local_rank: int, local_world_size: int, world_size: int) -> None:
    """Set the variables of this process and its chip, as torch_xla's own launcher does.

    Raises what torch_xla raises where the slice's shape cannot be known: EnvironmentError, or
    requests.RequestException where no metadata server answers.
    """
    import torch_xla.core.xla_env_vars as xenv
    from torch_xla._internal import tpu

    for name, value in changes(os.environ).items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    os.environ.setdefault(xenv.PJRT_LOCAL_PROCESS_RANK, str(local_rank))
    os.environ.setdefault(xenv.PJRT_LOCAL_PROCESS_COUNT, str(local_world_size))
    if world_size == 1:
        tpu.configure_one_chip_topology()
        return
    global _worker
    # Afterwards torch_xla takes the number of this process for it, where variables say it.
    _worker = tpu.worker_id()
    tpu.configure_topology(local_rank, local_world_size)


def worker() -> int | None:
    """The TPU worker number of this host, once `take_chip` has read it; None if it has not."""
    return _worker
