"""The processors that this process may use, and its scheduling priority."""

from __future__ import annotations

import contextlib
import os
import resource


def allowed_cpus() -> frozenset[int]:
    """Return the processors that this process may use, even if this thread is pinned to fewer.

    If OMP_PROC_BIND, KMP_AFFINITY or the like is set, OpenMP pins the thread that loads it
    (`import torch`) to one processor, and threads and processes that it starts inherit this. Older
    threads of a kernel keep all processors.
    """
    numbers: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            numbers |= os.sched_getaffinity(int(thread))
    return frozenset(numbers)


def lower_priority() -> None:
    """Give all other processes precedence, in a way that this process can undo.

    A nice value cannot be lowered again without privileges, and forks inherit it. Linux's batch
    scheduling can be left again; idle scheduling only by processes that may raise priorities.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if limit == resource.RLIM_INFINITY or limit >= 20:  # nice value 0 (sched(7))
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def restore_priority() -> None:
    """Return to normal scheduling, unless the user himself has chosen another."""
    if os.sched_getscheduler(0) in (os.SCHED_BATCH, os.SCHED_IDLE):
        with contextlib.suppress(
            PermissionError
        ):  # `chrt --idle 0 jupyter lab`, without privileges
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
