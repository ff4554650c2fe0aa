"""The interrupt key, counted instead of raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count presses of the interrupt key instead of raising in the middle of something.

    In the middle of an import as well, of which nbconvert brings many.

    Signal handlers belong to the main thread; a cell that runs elsewhere goes without.
    """
    pressed = [0]

    def count(number: int, frame: object) -> None:
        pressed[0] += 1

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, count)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
