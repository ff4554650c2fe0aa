"""The interrupt key: count its presses, and start processes that it does not reach.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from tpunb.utils.files import PACKAGE_ROOT

# Ignoring a signal discards a pending one.
_BEGIN = (
    "import signal as s, sys; s.signal(s.SIGINT, s.SIG_IGN); "
    "s.signal(s.SIGINT, s.default_int_handler); s.pthread_sigmask(s.SIG_UNBLOCK, {s.SIGINT}); "
    "sys.path[0] = sys.argv.pop(1); "
)


_presses = 0
"""Presses of the interrupt key in all blocks of `counted_interrupts`."""


@dataclass
class Interrupts:
    """The number of presses of the interrupt key."""

    count: int = 0


@contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """Count presses of the interrupt key in a block instead of raising KeyboardInterrupt in it.

    Imports are not interrupted either; nbconvert makes many. Signal handlers belong to the main
    thread, so in other threads nothing is counted.
    """
    interrupts = Interrupts()

    def count(number: int, frame: object) -> None:
        global _presses
        interrupts.count += 1
        _presses += 1

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, count)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


_lifelines: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(owner: Any) -> None:
    """Call `owner.close_pipes()` in every process that this one forks, as long as `owner` exists.

    Its lifeline is this process's alone: a DataLoader worker that outlives this process would keep
    the pipe open.
    """
    _lifelines.add(owner)


def _close_in_child() -> None:
    for owner in _lifelines:
        owner.close_pipes()


os.register_at_fork(after_in_child=_close_in_child)


def presses() -> int:
    """Return how often the interrupt key was pressed in blocks that count it."""
    return _presses


def become_in_own_session(code: str, *arguments: str) -> NoReturn:
    """Replace this process by one that `start_in_own_session` would start."""
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", _BEGIN + code, PACKAGE_ROOT, *arguments])


def start_in_own_session(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that runs code with this tpunb and that the interrupt key does not reach.

    The process has a session of its own. A key press signals the whole process group of the
    kernel, to which a new process belongs for a moment. A signal at that moment would kill the
    process as soon as it runs, so the signal is blocked until the process can discard it.

    `arguments`: its `sys.argv[1:]`. `options`: those of `subprocess.Popen`.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _BEGIN + code, PACKAGE_ROOT, *arguments],
            start_new_session=True,
            **options,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
