"""Rehearsal ranks of plain torch: with tensors of the CPU on gloo, or of a rehearsed TPU."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.drivers.ranks import rehearse

BACKENDS = {"cpu": "gloo", "tpu": "tpu_dist"}
"""torch.distributed's backend for tensors of each device."""


def rehearse_on(device: str, **options: Any) -> tuple[int, int]:
    """In a rank: install the rehearsal and the process group; return rank and world size."""
    module = "tpunb.backends.rehearsal.install"
    if device == "tpu":
        module = "tpunb.backends.torchtpu.rehearsal.tpu_dist"
        from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install

        install()
    rank, world = rehearse(module, **options)
    dist.init_process_group(BACKENDS[device])
    return rank, world
