"""The processors of this process."""

from __future__ import annotations

import contextlib
import os


def allowed() -> frozenset[int]:
    """The numbers of the processors that this process was given, whatever this thread has left.

    Where OMP_PROC_BIND, KMP_AFFINITY or the like is set, OpenMP pins the thread that loads it
    (`import torch`) to one processor, and all that this thread starts inherits that. The threads
    of a kernel that are older have kept the others.
    """
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found |= os.sched_getaffinity(int(thread))
    return frozenset(found)
