"""Presses of the interrupt key, counted. Standard library only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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
