"""Rehearsal of TorchTPU: the ranks of a run with tensors on a rehearsed TPU, and on the CPU."""

from __future__ import annotations

from tpunb.backends.rehearsal import install
from tpunb.backends.rehearsal.distributed import CPU
from tpunb.backends.rehearsal.install import FOREVER
from tpunb.backends.rehearsal.waiting import WaitTimes
from tpunb.backends.rehearsal.wire import Wire
from tpunb.backends.torchtpu.rehearsal.process_groups import install_process_groups, tpu_tensors


def install_rehearsal(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    timeout: float = FOREVER,
    times: WaitTimes | None = None,
) -> Wire:
    """As `tpunb.backends.rehearsal.install.install_rehearsal`, also for tensors on "tpu".

    The rehearsed device must have been installed.
    """
    install_process_groups()
    numbers = (rank, world_size, local_rank, local_world_size)
    return install.install_rehearsal(*numbers, timeout, times, kinds=(CPU, tpu_tensors()))
