"""What a rank has of this machine: its share of the processors, and memory in a TPU's terms."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, MutableMapping

from tpunb.worker import memory

THREADS = ("PJRT_NPROC", "NPROC")
"""XLA's client for CPUs reads them when it starts, in this order, and makes pools of so many
threads; without them of as many as there are processors (torch_xla 2.8 and 2.9)."""


def share_processors(env: MutableMapping[str, str], local_world_size: int) -> None:
    """Give XLA in this process its share of the processors, unless the person has said more.

    torch's own operations get theirs by OMP_NUM_THREADS, as torchrun's workers do.
    """
    if not any(name in env for name in THREADS):
        share = len(os.sched_getaffinity(0)) // local_world_size
        env[THREADS[0]] = str(max(1, share))


def memory_info(local_world_size: int) -> Mapping[str, int]:
    """What xm.get_memory_info() answers in bytes: of this process, and its share of the machine.

    XLA's client for CPUs has no such numbers (GetAllocatorStats is not supported).
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts kilobytes
    return {
        "bytes_used": used,
        "bytes_limit": memory.total() // local_world_size,
        "peak_bytes_used": max(peak, used),
    }
