"""Linux processes below this one: who they are, whether they live, how to signal them.

Standard library only: the supervisor uses it. Everything is read from /proc, so a process is
never waited for by anyone but its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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


def find_process(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none, or it is a zombie."""
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else Process(pid, stat.started)


def is_alive(process: Process) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    return find_process(process.pid) == process


def process_state(process: Process) -> str:
    """A letter of /proc: R runs, S sleeps, D cannot be interrupted, T is stopped; '' if ended."""
    stat = _stat(process.pid)
    return stat.state if stat is not None and stat.started == process.started else ""


def send_signal(process: Process, number: int) -> bool:
    """Signal exactly this process; False if it has ended."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def signal_and_continue(process: Process, number: int) -> bool:
    """Signal a process so that the signal acts even if the process is stopped (SIGSTOP)."""
    sent = send_signal(process, number)
    if sent and number != signal.SIGKILL:
        send_signal(process, signal.SIGCONT)
    return sent


def descendants(ancestor: int) -> list[Process]:
    """All living processes below `ancestor`, without it, parents before children."""
    children: dict[int, list[tuple[int, _Stat]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            children.setdefault(stat.ppid, []).append((int(name), stat))
    below: list[Process] = []
    queue = [ancestor]
    while queue:
        for pid, stat in children.get(queue.pop(0), []):
            queue.append(pid)
            if stat.state not in "ZX":
                below.append(Process(pid, stat.started))
    return below


@dataclass(frozen=True)
class Work:
    """What a process and all below it have done so far; children that have ended count."""

    seconds: float
    """Of processor time."""
    bytes: int
    """Read and written by its system calls; what goes through sockets counts in part."""


def work_done(process: Process) -> Work:
    """The work of a process and of all below it; none if it has ended."""
    if not is_alive(process):
        return Work(0.0, 0)
    ticks = moved = 0
    for each in [process, *descendants(process.pid)]:
        ticks += _ticks(each.pid)
        moved += _bytes_moved(each.pid)
    return Work(ticks / os.sysconf("SC_CLK_TCK"), moved)


def resident_bytes(pid: int) -> int:
    """Bytes of a process in RAM, shared pages included; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _ticks(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(map(int, fields[11:15]))  # utime, stime, and those of children that have ended


def _bytes_moved(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            lines = file.read().splitlines()
    except OSError:  # it has ended, or this kernel does not tell
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith((b"rchar", b"wchar")))


def with_variables(entries: Collection[str]) -> list[Process]:
    """Living processes that were started with one of these ('NAME=value') in their environment.

    Whoever their parents are by now. A fork that has started no program has the environment of the
    process that did. This process is not among them.
    """
    wanted = {entry.encode() for entry in entries}
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environ = file.read()
        except OSError:  # it has ended, or is another user's
            continue
        process = None if wanted.isdisjoint(environ.split(b"\0")) else find_process(int(name))
        if process is not None:
            found.append(process)
    return found


def exit_code(pid: int) -> int | None:
    """How a child has ended, negative for a signal; None if it has not, or is no child."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def reap_adopted(own: Sequence[Process]) -> None:
    """Let go of children that this process only adopted and that have ended, but not of `own`."""
    pids = {process.pid for process in own}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in pids:
            continue
        stat = _stat(int(name))
        if stat is not None and stat.ppid == os.getpid() and stat.state == "Z":
            os.waitpid(int(name), os.WNOHANG)


def die_with_adopter(adopter: int) -> None:
    """`die_with_parent` for a process of `fork_orphan`; nothing where nobody adopts orphans."""
    if os.getppid() == adopter:
        die_with_parent(adopter)


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


def fork_orphan(fork: Callable[[], int], tell: Callable[[int], None], *, wait: bool = True) -> int:
    """Fork a process that is no child of this one. `fork` does as `os.fork`.

    0 in it. Here the pid of a process between the two, which calls `tell` with the pid of the new
    one and ends; without `wait` the caller waits for it. OSError without memory for another.

    Its parent is the next process above that adopts orphans (`adopt_orphans`), so that it lives on
    when this one is killed, and is not found by a `wait` for any child here.
    """
    with own_children():
        between = fork()
        if between == 0:
            parent = os.getpid()
            forked = -1
            try:
                forked = os.fork()
                if forked:
                    tell(forked)
            finally:
                if forked:
                    os._exit(0)
            while os.getppid() == parent:  # a moment
                time.sleep(0.0005)
        elif wait:
            with contextlib.suppress(ChildProcessError):  # a thread waits for any child
                os.waitpid(between, 0)
        return between


@contextlib.contextmanager
def own_children() -> Iterator[None]:
    """A block in which children that end are this block's to wait for.

    A handler for SIGCHLD that a cell has set may wait for any child, and where the signal is
    ignored nobody can.
    """
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:  # else it is C code's, and Python cannot put it back
            signal.signal(signal.SIGCHLD, handler)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    It does not reach this process's own children, so it only backs up the supervisor. `parent` is
    the pid that the parent had: if it died before the call, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
