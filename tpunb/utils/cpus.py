"""The processors that this process may use, and how it shares them."""

from __future__ import annotations

import contextlib
import os
import resource


def allowed_cpus() -> frozenset[int]:
    """The processors that this process may use, even if this thread is pinned to fewer.

    Where OMP_PROC_BIND, KMP_AFFINITY or the like is set, OpenMP pins the thread that loads it
    (`import torch`) to one processor, and all that this thread starts inherits that. The threads
    of a kernel that are older have kept the others.
    """
    numbers: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            numbers |= os.sched_getaffinity(int(thread))
    return frozenset(numbers)


def lower_priority() -> None:
    """Let all other processes compute first, as far as this one may take it back later.

    A nice value cannot be lowered again without privileges, and forks inherit it; Linux's batch
    scheduling can be left again, and so can its idle scheduling, by who may raise priorities.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if limit == resource.RLIM_INFINITY or limit >= 20:  # nice value 0 (sched(7))
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def restore_priority() -> None:
    """The usual scheduling again."""
    if os.sched_getscheduler(0) in (os.SCHED_BATCH, os.SCHED_IDLE):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
