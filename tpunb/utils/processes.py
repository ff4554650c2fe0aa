"""Find, check and signal Linux processes, mainly descendants of this one.

Standard library only, because the supervisor uses it. Everything is read from /proc, so only the
parent of a process waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

# From <linux/prctl.h>; Python has no wrapper for prctl.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

spawned_by_rank = False
"""True in a process that a rank has started by multiprocessing's spawn or forkserver."""


@dataclass(frozen=True)
class Process:
    """A process, distinguished by its start time from a later one with the same pid."""

    pid: int
    started: int
    """Clock ticks since boot (field 22 of /proc/<pid>/stat)."""


@dataclass(frozen=True)
class _Stat:
    ppid: int
    state: str
    started: int


def _stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the third on; [] if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in brackets, may itself contain spaces and brackets.
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _stat(pid: int) -> _Stat | None:
    fields = _stat_fields(pid)
    if not fields:
        return None
    return _Stat(ppid=int(fields[1]), state=fields[0].decode(), started=int(fields[19]))


def find_process(pid: int) -> Process | None:
    """Return the process that has this pid now; None if there is none, or it is a zombie."""
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else Process(pid, stat.started)


def is_alive(process: Process) -> bool:
    """True if exactly this process is still running and not a zombie."""
    return find_process(process.pid) == process


def process_state(process: Process) -> str:
    """Return /proc's letter: R runs, S sleeps, D is uninterruptible, T is stopped; '' if ended."""
    stat = _stat(process.pid)
    return stat.state if stat is not None and stat.started == process.started else ""


def is_zombie(pid: int) -> bool:
    """True if the process has ended and its parent has not read its exit code yet."""
    stat = _stat(pid)
    return stat is not None and stat.state == "Z"


def send_signal(process: Process, number: int) -> bool:
    """Signal exactly this process; return False if it has ended."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def signal_and_continue(process: Process, number: int) -> bool:
    """Signal a process, and continue it, so that the signal takes effect after a SIGSTOP too."""
    sent = send_signal(process, number)
    if sent and number != signal.SIGKILL:
        send_signal(process, signal.SIGCONT)
    return sent


def _children() -> dict[int, list[tuple[int, _Stat]]]:
    """All processes by the pid of their parent."""
    children: dict[int, list[tuple[int, _Stat]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            children.setdefault(stat.ppid, []).append((int(name), stat))
    return children


def descendants(ancestor: int) -> list[Process]:
    """Return all living descendants of `ancestor`, parents before children."""
    return _below(ancestor, _children())


def _below(ancestor: int, children: dict[int, list[tuple[int, _Stat]]]) -> list[Process]:
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
    """The work of a process and its descendants so far, including children that have ended."""

    seconds: float
    """Seconds of processor time."""
    bytes: int
    """Bytes read and written by system calls; those of sockets count in part."""


def work_done(ancestors: Iterable[Process]) -> dict[Process, Work]:
    """Return the work of each process and its descendants; zero if it has ended."""
    children, done = _children(), {}
    for ancestor in ancestors:
        ticks = moved = 0
        if is_alive(ancestor):
            for each in [ancestor, *_below(ancestor.pid, children)]:
                ticks += _ticks(each.pid)
                moved += _bytes_moved(each.pid)
        done[ancestor] = Work(ticks / os.sysconf("SC_CLK_TCK"), moved)
    return done


def resident_bytes(pid: int) -> int:
    """Return the bytes of a process in RAM, including shared pages; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _ticks(pid: int) -> int:
    # utime, stime, and those of children that have ended
    return sum(map(int, _stat_fields(pid)[11:15]))


def _bytes_moved(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            lines = file.read().splitlines()
    except OSError:  # it has ended, or this kernel does not report it
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith((b"rchar", b"wchar")))


def with_variables(entries: Collection[str]) -> list[Process]:
    """Return living processes with one of `entries` ('NAME=value') in their initial environment.

    They may have any parent by now. A fork has the initial environment of the process that started
    the program. This process is not included.
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
    """Return a child's exit code, negative for a signal; None if it is running or not a child."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def reap_adopted(own: Sequence[Process]) -> None:
    """Reap ended children that this process has adopted, but not `own`."""
    pids = {process.pid for process in own}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in pids:
            continue
        stat = _stat(int(name))
        if stat is not None and stat.ppid == os.getpid() and stat.state == "Z":
            os.waitpid(int(name), os.WNOHANG)


def set_title(role: str, run: str = "") -> None:
    """Show this process in ps as 'python tpunb: rank 1 of wine', in top as 'tpunb: rank 1'.

    The title replaces the arguments where ps reads them: in this process's memory, and in that of
    its forks. The program's name stays, because C libraries print it. Where the kernel does not
    tell the place (gVisor's), or it cannot be written, nothing changes. setproctitle would write
    over the environment, too, by which processes are found, and the supervisor loads no library.
    """
    title = f"tpunb: {role}"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)
    begin, end = (int(field) for field in (_stat_fields(os.getpid())[45:47] or (0, 0)))
    full = f"{title} of {run}" if run else title
    with contextlib.suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as memory:
        with open("/proc/self/cmdline", "rb") as file:
            begin += len(file.read().partition(b"\0")[0]) + 1
        if room := max(0, end - begin):
            os.pwrite(memory.fileno(), full.encode()[: room - 1].ljust(room, b"\0"), begin)


def die_with_adopter(adopter: int) -> None:
    """Call `die_with_parent` in a process of `fork_orphan`, if its adopter is the parent."""
    if os.getppid() == adopter:
        die_with_parent(adopter)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own parent.

    If the kernel does not support this (gVisor's of 2022), daemons that a rank has started are not
    found at the end of the run.
    """
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def fork_orphan(fork: Callable[[], int], tell: Callable[[int], None], *, wait: bool = True) -> int:
    """Fork a process that is not a child of this one. `fork` works like `os.fork`.

    Return 0 in the new process. In this process, return the pid of an intermediate process, which
    calls `tell` with the pid of the new one and ends; without `wait`, the caller must wait for it.
    Raises OSError if there is no memory for another process.

    The new process's parent is the next ancestor that adopts orphans (`adopt_orphans`): so it
    survives a kill of this process, and a `wait` for any child in this process does not reap it.
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


def wait_for_child(pid: int, seconds: float) -> int:
    """Return the wait status of a child, which is killed if it has not ended within `seconds`.

    Raises ChildProcessError if another thread has waited for it.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


@contextlib.contextmanager
def own_children() -> Iterator[None]:
    """Reserve children that end in a block for the block to wait for.

    A SIGCHLD handler that a cell has set may wait for any child, and if the signal is ignored,
    children cannot be waited for.
    """
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:  # a handler of C code, which Python cannot restore, is None
            signal.signal(signal.SIGCHLD, handler)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    This process's own children are not killed, so this only backs up the supervisor. `parent` is
    the pid of the parent: if the parent died before the call, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
