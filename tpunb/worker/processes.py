"""Linux processes below this one: who they are, whether they live, how to signal them.

Standard library only: the guard uses it. Everything is read from /proc, so a process is
never waited for by anyone but its parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from dataclasses import dataclass

# From <linux/prctl.h>; Python has no wrapper for prctl.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """One process, told apart from a later one with the same pid by its start time."""

    pid: int
    started: int
    """Clock ticks since boot (field 22 of /proc/<pid>/stat)."""


@dataclass(frozen=True)
class _Stat:
    ppid: int
    state: str
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in brackets, may itself hold spaces and brackets.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _Stat(ppid=int(fields[1]), state=fields[0].decode(), started=int(fields[19]))


def find(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none, or it is a zombie."""
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else Process(pid, stat.started)


def alive(process: Process) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    return find(process.pid) == process


def state(process: Process) -> str:
    """A letter of /proc: R runs, S sleeps, D cannot be interrupted, T is stopped; '' if ended."""
    stat = _stat(process.pid)
    return stat.state if stat is not None and stat.started == process.started else ""


def send(process: Process, number: int) -> bool:
    """Signal exactly this process; False if it has ended."""
    if not alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def end(process: Process, number: int) -> bool:
    """Signal a process so that the signal acts even if the process is stopped (SIGSTOP)."""
    sent = send(process, number)
    if sent and number != signal.SIGKILL:
        send(process, signal.SIGCONT)
    return sent


def descendants(ancestor: int) -> list[Process]:
    """All living processes below `ancestor`, without it, parents before children."""
    children: dict[int, list[tuple[int, _Stat]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            children.setdefault(stat.ppid, []).append((int(name), stat))
    found: list[Process] = []
    queue = [ancestor]
    while queue:
        for pid, stat in children.get(queue.pop(0), []):
            queue.append(pid)
            if stat.state not in "ZX":
                found.append(Process(pid, stat.started))
    return found


def reap_adopted(own: Process | None) -> None:
    """Let go of children that this process only adopted and that have ended, but not of `own`."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or (own is not None and int(name) == own.pid):
            continue
        stat = _stat(int(name))
        if stat is not None and stat.ppid == os.getpid() and stat.state == "Z":
            os.waitpid(int(name), os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its own.

    Where the kernel has no such thing (gVisor's of 2022), what a rank has started and left alone
    is not found at the end of the run.
    """
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    It does not reach this process's own children, so it only backs up the guard. `parent` is
    the pid that the parent had: if it died before the call, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
