"""File descriptors: waiting for them, and tpunb's own, which `os.closerange` must leave open.

Code that makes a process a daemon closes all descriptors from 3 on. In a process of a run these
include its connections to the supervisor and to the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Iterator

_LONGEST = 1e6
"""Seconds; the system takes at most 2**31 ms."""
_closerange = os.closerange
_pid = 0
_own: set[int] = set()
_users: set[int] = set()


def wait_readable(
    fds: Iterable[int], seconds: float | None, *, writable: int | None = None
) -> set[int]:
    """Wait until one of these can be read or its other end is closed; return all that can.

    Also wait until `writable` can be written to.

    Returns an empty set after `seconds`, if given, and after `_LONGEST` at the latest. Unlike
    `select.select`, it works for descriptors above 1023.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    if writable is not None:
        poll.register(writable, select.POLLOUT)
    return {fd for fd, _ in poll.poll(None if seconds is None else 1000 * min(seconds, _LONGEST))}


def keep_own() -> None:
    """From now on, `os.closerange` in this process closes only descriptors of the user's code.

    All descriptors open now are tpunb's, except those that `note_users` recorded. In forks of this
    process, `os.closerange` closes all descriptors again.
    """
    global _pid
    _own.clear()
    _own.update(_find_open() - _users)
    _pid = os.getpid()
    os.closerange = _close_others


def note_users() -> None:
    """Record the descriptors opened since `keep_own` as the user's."""
    _users.clear()
    _users.update(_find_open() - _own)


@contextlib.contextmanager
def opening_own() -> Iterator[None]:
    """Record the descriptors opened in a block as tpunb's."""
    before = _find_open()
    try:
        yield
    finally:
        _own.update(_find_open() - before)


def _find_open() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            os.fstat(int(name))
            found.add(int(name))
    return found


def _close_others(low: int, high: int, /) -> None:
    """Replacement of `os.closerange`; raises nothing, like the original."""
    for each in sorted(_own) if os.getpid() == _pid else ():
        if low <= each < high:
            _closerange(low, each)
            low = each + 1
    _closerange(low, high)
