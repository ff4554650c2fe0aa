"""Which chip of which host a rank has: what torch_xla is told before its TPU runtime starts.

torch_xla (2.8, 2.9; _internal/tpu.py) reads the slice's shape from the metadata server, or, where
TPU_SKIP_MDS_QUERY is set, from variables, and then sets those of one process and its chip. But it
keeps each that is set already (os.environ.setdefault), and some platforms set those of a process
that drives a whole host: LeaderWorkerSet (lws, pkg/utils/accelerators/tpu.go), KubeRay's webhook
on v7x, Kaggle ('local'). With them, ranks of one chip each never meet.
"""

from __future__ import annotations

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
