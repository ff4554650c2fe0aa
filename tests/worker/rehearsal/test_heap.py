"""A rank gives back what malloc keeps."""

from __future__ import annotations

import ctypes

import pytest

from tpunb.worker.rehearsal import heap


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.skipif(heap.Heap().free() == 0, reason="this C library has no mallinfo2")
def test_what_is_kept_free_goes_back_now_and_then() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    # Small enough for the heap. What stays is as large as what is freed: something smaller could
    # lie in holes that were there before, and all that is freed would go back by itself.
    blocks = [
        (libc.malloc(100_000), libc.malloc(100_000)) for _ in range(3 * heap.SPARE // 100_000)
    ]
    for block, _ in blocks:
        ctypes.memset(block, 1, 100_000)
    before = resident()
    for block, _ in blocks:
        libc.free(block)
    mine = heap.Heap()
    assert mine.free() > 2 * heap.SPARE
    mine.tidy()
    assert resident() < before - 2 * heap.SPARE
    for _, kept in blocks:
        libc.free(kept)
    mine._info = lambda: pytest.fail("it is too early")
    mine.tidy()
