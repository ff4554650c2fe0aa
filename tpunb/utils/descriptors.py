"""File descriptors of tpunb's own, which `os.closerange` in a cell leaves open.

Code that becomes a daemon, or is meant to, closes all from 3 on. In a process of a run these are
its connections to the supervisor and to the other ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_closerange = os.closerange
_pid = 0
_own: set[int] = set()
_users: set[int] = set()


def keep_own() -> None:
    """From now on, `os.closerange` in this process closes only what the user's code has opened.

    All that is open now is tpunb's, but for what `note_users` has seen. In a process that is
    forked from this one, it closes everything again.
    """
    global _pid
    _own.clear()
    _own.update(_find_open() - _users)
    _pid = os.getpid()
    os.closerange = _close_others


def note_users() -> None:
    """What has been opened since `keep_own` is the user's."""
    _users.clear()
    _users.update(_find_open() - _own)


@contextlib.contextmanager
def opening_own() -> Iterator[None]:
    """A block in which tpunb opens some."""
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
    """`os.closerange`, which raises nothing."""
    for each in sorted(_own) if os.getpid() == _pid else ():
        if low <= each < high:
            _closerange(low, each)
            low = each + 1
    _closerange(low, high)
