"""The interrupt key: its presses counted, and processes that it does not reach.

Standard library only.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tpunb.utils.files import PACKAGE_ROOT

# Ignoring a signal drops one that is pending.
_BEGIN = (
    "import signal as s, sys; s.signal(s.SIGINT, s.SIG_IGN); "
    "s.signal(s.SIGINT, s.default_int_handler); s.pthread_sigmask(s.SIG_UNBLOCK, {s.SIGINT}); "
    "sys.path[0] = sys.argv.pop(1); "
)


@dataclass
class Interrupts:
    """How often the interrupt key was pressed."""

    count: int = 0


@contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """Count presses of the interrupt key instead of raising in the middle of something.

    In the middle of an import as well, of which nbconvert brings many.

    Signal handlers belong to the main thread; what runs elsewhere goes without.
    """
    interrupts = Interrupts()

    def count(number: int, frame: object) -> None:
        interrupts.count += 1

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, count)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def start_apart(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Run code with this tpunb in a session of its own: the interrupt key does not reach it.

    A key press signals the whole group of the kernel, and for a moment a new process belongs to
    it. A signal of that moment stays pending and would kill the process as soon as it has begun,
    so it is held back until the process can drop it.

    `arguments` are its `sys.argv[1:]`; `options` are those of `subprocess.Popen`.
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
