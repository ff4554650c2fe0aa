"""Rehearsal of TorchTPU: the ranks of a run with tensors on a rehearsed TPU, and on the CPU."""

from __future__ import annotations

from typing import Any

from tpunb.backends.rehearsal import install
from tpunb.backends.rehearsal.distributed import CPU
from tpunb.backends.torchtpu.rehearsal.process_groups import install_process_groups, tpu_tensors


def install_rehearsal(rank: int, world_size: int, **options: Any) -> None:
    """As `tpunb.backends.rehearsal.install.install_rehearsal`, also for tensors on "tpu".

    The rehearsed device must have been installed.
    """
    install_process_groups()
    kinds = (CPU, tpu_tensors())
    install.install_rehearsal(rank, world_size, kinds=kinds, **options)
