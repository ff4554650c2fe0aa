"""What malloc keeps of the memory that XLA gives back: a rank may not grow by it.

XLA frees its buffers in threads of its own, and what is small and stays keeps malloc from using
the holes again: a rank that trains on batches of 10 MB grew by 4 MB a step (seen with glibc 2.36).
"""

from __future__ import annotations

import ctypes
import time

SPARE = 1 << 27
"""Bytes that malloc may keep free: using them again is faster than asking the kernel."""
INTERVAL = 2.0
"""Seconds between two looks."""


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Heap:
    """That of this process."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)
        self._info = getattr(libc, "mallinfo2", None)  # glibc has it from 2.33 on
        if self._info is not None:
            self._info.restype = _Info
        self._next = 0.0

    def free(self) -> int:
        """Bytes that malloc keeps; 0 where it cannot be asked."""
        return 0 if self._info is None else int(self._info().fordblks)

    def tidy(self) -> None:
        """Now and then, give the kernel what is more than SPARE (0.2 µs if it is not time yet)."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        if self._trim is not None and self.free() > SPARE:
            self._trim(0)


mine = Heap()
"""That of this process."""
