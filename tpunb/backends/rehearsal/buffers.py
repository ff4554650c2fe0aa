"""Flat buffers for messages between ranks; large ones are reused.

Copying 100 MB into new memory takes longer than reducing it with gloo (measured, 2 ranks), because
the kernel clears every page first.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Sequence

import torch

ALIGNMENT = 64
"""Bytes. XLA takes over aligned memory only (tsl's MinAlign; torch's allocator agrees)."""
REUSED = 1 << 18
"""Bytes from which on this module keeps memory for reuse. Smaller blocks are left to malloc."""
KEPT = 1 << 28
"""Bytes of free memory that are kept, at most."""
SPARE = 1 << 27
"""Bytes at the end of the heap that malloc keeps: reusing them is faster than asking the kernel."""
INTERVAL = 2.0
"""Seconds between two calls of malloc_trim."""


def flatten_values(
    values: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, list[int]]:
    """A new flat tensor with all values as `dtype`, and the sizes by which to split it.

    Each value begins where XLA can take it over, also after a cast back to its own type. So
    each is followed by a padding of zeros, which may be empty.
    """
    unit = ALIGNMENT // min(dtype.itemsize, values[0].itemsize)
    pieces: list[torch.Tensor] = []
    sizes: list[int] = []
    for value in values:
        pieces.append(value if value.dim() == 1 else value.reshape(-1))
        count = value.numel()
        gap = -count % unit
        if gap:
            pieces.append(_zeros(gap, value.dtype))
        sizes += count, gap
    return torch.cat(pieces, out=memory.empty(sum(sizes), dtype)), sizes


@functools.lru_cache(maxsize=512)
def _zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def as_bytes(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The concatenated bytes. A single value is not copied: never write to the result."""
    flat = [value.contiguous().view(-1).view(torch.uint8) for value in values]
    if len(flat) == 1:
        return flat[0]
    size = sum(value.numel() for value in flat)
    return torch.cat(flat, out=memory.empty(size, torch.uint8))


def join_values(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate values of one shape along a dimension, in a new tensor."""
    shape = list(values[0].shape)
    shape[dim] *= len(values)
    joined = memory.empty(math.prod(shape), values[0].dtype).view(shape)
    return torch.cat(list(values), dim, out=joined)


class Memory:
    """Memory for large tensors, reused once neither torch nor XLA holds it."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._lent: list[torch.Tensor] = []
        self._next_release = 0

    def lend(self, tensor: torch.Tensor) -> None:
        """Keep a tensor until XLA, which took over its memory, has released it.

        XLA releases it in a thread of its own. A Python object freed in that thread would wait for
        the GIL, which another thread may hold while it waits for XLA: seen as a hang.
        """
        self._lent.append(tensor)
        if len(self._lent) > self._next_release:
            self._release()
            self._next_release = 2 * len(self._lent) + 64

    def _release(self) -> None:
        self._lent = [tensor for tensor in self._lent if tensor._use_count() > 1]  # type: ignore[attr-defined]

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, uninitialized tensor."""
        size = count * dtype.itemsize
        if size < REUSED:
            return torch.empty(count, dtype=dtype)
        tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(self._storage(size))
        return tensor[:count]

    def _storage(self, size: int) -> torch.UntypedStorage:
        self._release()
        free = [storage for storage in self._storages if _is_free(storage)]
        for storage in free:
            if size <= storage.nbytes() <= 2 * size:
                return storage
        left = size + sum(storage.nbytes() for storage in free) - KEPT
        dropped = set()
        for storage in free:
            if left > 0:
                left -= storage.nbytes()
                dropped.add(id(storage))
        new = torch.UntypedStorage(math.ceil(size / ALIGNMENT) * ALIGNMENT)
        self._storages = [kept for kept in self._storages if id(kept) not in dropped] + [new]
        return new


memory = Memory()
"""The memory of this process."""


def _is_free(storage: torch.UntypedStorage) -> bool:
    """True if nothing but this object holds the memory."""
    return torch._C._storage_Use_Count(storage._cdata) == 1


class Heap:
    """malloc's free memory in this process.

    XLA frees its buffers in threads of its own, and small blocks that remain keep malloc from
    reusing the gaps: a rank that trained on batches of 10 MB grew by 4 MB a step (seen with glibc
    2.36).
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        self._next_trim = 0.0

    def trim(self) -> None:
        """Return free memory to the kernel, once per INTERVAL (0.2 µs in between)."""
        now = time.monotonic()
        if self._trim is not None and now >= self._next_trim:
            self._next_trim = now + INTERVAL
            self._trim(ctypes.c_size_t(SPARE))


heap = Heap()
"""The heap of this process."""
