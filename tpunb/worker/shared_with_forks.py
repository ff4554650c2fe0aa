"""Finds what a process shares with its forks, through which one run could affect another.

Forked processes share connections, pipes, positions in open files and shared memory mappings, and
they cannot wait for the children of the process that they were forked from. Everything else is
each process's own after the fork. Reads /proc, which takes a few milliseconds.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
import weakref
from collections.abc import Iterator

from tpunb.worker import fork_safety

_KINDS = {
    stat.S_IFSOCK: "holds a connection or a listening socket open",
    stat.S_IFIFO: "holds a pipe open",
}
_PLAIN_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_MAPPING = re.compile(r"^\S+ rw.s \S+ (\S+ \d+) *(.*)$", re.MULTILINE)
_SEMAPHORE = "/dev/shm/sem."
"""Locks of multiprocessing, which tqdm makes when it is imported. They are not held at a fork."""


def find_all() -> dict[str, str]:
    """Everything that this process shares: a key for each thing, and a verb phrase for messages."""
    found = dict(_open_files())
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for device, path in _MAPPING.findall(file.read()):
            if not path.startswith(_SEMAPHORE):
                found[f"{device} {path}"] = "has memory that processes share"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return found
    return {**found, "children": "has started a process"}


def describe_new(before: dict[str, str]) -> str:
    """A verb phrase for the first thing that was not found `before`; '' if there is none."""
    new = {name: words for name, words in find_all().items() if name not in before}
    # Libraries replace some of these things in a fork, as Arrow does its pipe for signals.
    gone = (
        new
        and "children" not in new
        and fork_safety.run_in_fork(lambda: not new.keys() & find_all().keys())
    )
    return "" if gone else next(iter(new.values()), "")


def _open_files() -> Iterator[tuple[str, str]]:
    for fd, status, flags in _file_descriptors():
        kind = stat.S_IFMT(status.st_mode)
        name = f"{kind:o} {status.st_dev} {status.st_ino}"
        if kind in _KINDS:
            yield name, _KINDS[kind]
        elif kind == 0:  # epoll, eventfd, timerfd, inotify
            yield f"{os.readlink(f'/proc/self/fd/{fd}')} {fd}", "holds an event queue open"
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            device = os.readlink(f"/proc/self/fd/{fd}")
            if device not in _PLAIN_DEVICES:
                yield f"{name} {status.st_rdev}", f"has {device} open"
        elif kind == stat.S_IFREG and flags & os.O_ACCMODE != os.O_RDONLY:
            file = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            if not status.st_nlink:
                yield name, "has a temporary file open, or memory that processes share"
            elif not flags & os.O_APPEND:  # with O_APPEND the shared position does not matter
                yield name, f"has {file} open for writing"


def file_offsets() -> dict[int, int]:
    """The position of the next read in each open file, which forks share."""
    return {
        fd: os.lseek(fd, 0, os.SEEK_CUR)
        for fd, status, flags in _file_descriptors()
        if stat.S_ISREG(status.st_mode) and flags & os.O_ACCMODE == os.O_RDONLY
    }


def _file_descriptors() -> Iterator[tuple[int, os.stat_result, int]]:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd <= 2:
            continue
        try:
            yield fd, os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # the descriptor of the listing itself
            continue


def temporary_folders() -> list[str]:
    """Folders of `tempfile.TemporaryDirectory` that this process will remove at its exit.

    Private names, checked on Python 3.10 to 3.13: `weakref.finalize._registry` has the finalizers
    that run at exit; `TemporaryDirectory._cleanup` is that of a folder, whose name comes first.
    """
    tempfile = sys.modules.get("tempfile")
    if tempfile is None:
        return []
    cleanup = tempfile.TemporaryDirectory._cleanup.__func__
    return [
        info.args[0]
        for info in list(weakref.finalize._registry.values())  # type: ignore[attr-defined]
        if getattr(info.func, "__func__", None) is cleanup
    ]
