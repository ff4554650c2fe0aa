"""Corrects the variables from which torch_xla derives the chip of each rank.

torch_xla (2.8, 2.9; _internal/tpu.py) reads the slice's shape from the metadata server, or, if
TPU_SKIP_MDS_QUERY is set, from variables, and then sets the variables of one process and its chip.
But it keeps variables that are set already (os.environ.setdefault), and some platforms set them for
a process that drives a whole host: LeaderWorkerSet (lws, pkg/utils/accelerators/tpu.go), KubeRay's
webhook on v7x, Kaggle ('local'). With these, ranks with one chip each never meet.
"""

from __future__ import annotations

from collections.abc import Mapping

PER_PROCESS = ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID")
"""Variables of one process: correct if one process drives all chips of a host (SPMD)."""
_OF_HOST = {
    "TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
    "CLOUD_TPU_TASK_ID": "TPU_WORKER_ID",
}
"""Variables from which torch_xla first reads a fact about hosts, and to which it then writes one
about this process; each with the variable that it reads next."""


def changes(env: Mapping[str, str]) -> dict[str, str | None]:
    """The changes to `env` with which torch_xla gives each process a chip; None: remove it.

    Without a metadata server, the removed variables' values are moved to the variables for hosts,
    from which torch_xla reads them.
    """
    found: dict[str, str | None] = {name: None for name in (*PER_PROCESS, *_OF_HOST) if name in env}
    if env.get("TPU_SKIP_MDS_QUERY"):
        for name, of_host in _OF_HOST.items():
            if name in env and env.get(of_host) != env[name]:
                found[of_host] = env[name]
    return found
