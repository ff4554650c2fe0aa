"""Values of XLA tensors on the CPU and back, without copies: there XLA's memory is the host's.

A copy of 100 MB into new memory takes longer than gloo takes to reduce it (measured, 2 ranks):
the kernel clears every page of it first. So memory for large messages is used again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch_xla
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

_XLAC = torch_xla._XLAC  # type: ignore[attr-defined]

ALIGNMENT = 64
"""Bytes: XLA takes no memory that begins elsewhere (tsl's MinAlign; torch's allocator agrees)."""
REUSED = 1 << 18
"""Bytes from which on memory is worth keeping: below, malloc does."""
KEPT = 1 << 28
"""Bytes of free memory that are kept at most."""


def from_xla(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of tensors that are computed, in XLA's own memory: never write to them."""
    try:
        _XLAC._get_tensors_handle(tensors)  # _to_dlpack ends the process if one has no memory
    except RuntimeError:  # it is on the CPU, or a number that XLA keeps in its programs
        plain = [tensor.detach() for tensor in tensors]
        values: list[torch.Tensor] = _XLAC._xla_get_cpu_tensors(plain)
        return values
    return [from_dlpack(_XLAC._to_dlpack(tensor)) for tensor in tensors]


def to_xla(value: torch.Tensor) -> torch.Tensor:
    """A new XLA tensor in the memory of `value`: do not use that again."""
    if value.data_ptr() % ALIGNMENT or not value.is_contiguous():
        value = value.clone(memory_format=torch.contiguous_format)
    # Not a part of another tensor: torch 2.8 would have XLA hold that one instead, see `lend`.
    value = value.data
    tensor: torch.Tensor = _XLAC._from_dlpack(to_dlpack(value))
    memory.lend(value)
    return tensor


def flatten(values: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """A new flat tensor that holds all values as `dtype`, and how to split it.

    Each value begins where XLA can take it over, also when all is turned back into its own
    type. So behind each there is a part of zeros, which may be empty.
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
    """The values one after the other; one alone in its own memory: never write to it."""
    flat = [value.contiguous().view(-1).view(torch.uint8) for value in values]
    if len(flat) == 1:
        return flat[0]
    size = sum(value.numel() for value in flat)
    return torch.cat(flat, out=memory.empty(size, torch.uint8))


def join(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """A new tensor: the values, all of one shape, one after the other along a dimension."""
    shape = list(values[0].shape)
    shape[dim] *= len(values)
    joined = memory.empty(math.prod(shape), values[0].dtype).view(shape)
    return torch.cat(list(values), dim, out=joined)


class Memory:
    """Memory for large tensors that is used again when neither torch nor XLA holds it."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._lent: list[torch.Tensor] = []
        self._look_at = 0

    def lend(self, tensor: torch.Tensor) -> None:
        """Keep a tensor until XLA, which has its memory, needs it no more.

        XLA lets go of it in a thread of its own. A Python object that died there would wait for
        the interpreter, which another thread may hold while it waits for XLA: seen as a hang.
        """
        self._lent.append(tensor)
        if len(self._lent) > self._look_at:
            self._let_go()
            self._look_at = 2 * len(self._lent) + 64

    def _let_go(self) -> None:
        self._lent = [each for each in self._lent if each._use_count() > 1]  # type: ignore[attr-defined]

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor whose values are anything."""
        size = count * dtype.itemsize
        if size < REUSED:
            return torch.empty(count, dtype=dtype)
        tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(self._storage(size))
        return tensor[:count]

    def _storage(self, size: int) -> torch.UntypedStorage:
        self._let_go()
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
        self._storages = [each for each in self._storages if id(each) not in dropped] + [new]
        return new


memory = Memory()
"""That of this process."""


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Whether nothing but this object holds the memory."""
    return torch._C._storage_Use_Count(storage._cdata) == 1
