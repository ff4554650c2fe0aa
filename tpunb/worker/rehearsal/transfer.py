"""Values of XLA tensors on the CPU and back, without copies: there XLA's memory is the host's.

A copy of 100 MB into new memory takes longer than gloo takes to reduce it (measured, 2 ranks):
the kernel clears every page of it first. So memory for large messages is used again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch_xla
from torch.utils.dlpack import from_dlpack, to_dlpack

_XLAC = torch_xla._XLAC  # type: ignore[attr-defined]

ALIGNMENT = 64
"""Bytes: XLA takes no memory that begins elsewhere (tsl's MinAlign; torch's allocator agrees)."""
REUSED = 1 << 18
"""Bytes from which on memory is worth keeping: below, malloc does."""
KEPT = 1 << 28
"""Bytes of free memory that are kept at most."""


def read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values on the CPU, in XLA's own memory: never write to them.

    Computes what is pending, and runs no step closures. Before the others are waited for: an
    interrupt or an error in a long computation finds this rank outside the collective. Not
    `torch_xla.sync()`: that would run closures in the middle of a step.
    """
    plain = [tensor.detach() for tensor in tensors]
    if any(_XLAC._check_tensor_need_materialization(plain)):
        _XLAC._xla_sync_live_tensors("", [], True)
    else:
        _XLAC._xla_wait_device_ops([])
    try:
        _XLAC._get_tensors_handle(plain)  # _to_dlpack ends the process if there is none
    except RuntimeError:  # a tensor on the CPU, or a number that XLA keeps in its programs
        values: list[torch.Tensor] = _XLAC._xla_get_cpu_tensors(plain)
        return values
    return [from_dlpack(_XLAC._to_dlpack(tensor)) for tensor in plain]


def on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor as a new tensor of `device`, whose memory it becomes: do not use it again."""
    if device.type != "xla":
        return value.to(device)
    if value.data_ptr() % ALIGNMENT or not value.is_contiguous():
        value = value.clone(memory_format=torch.contiguous_format)
    tensor: torch.Tensor = _XLAC._from_dlpack(to_dlpack(value))
    return tensor


def flatten(
    values: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A new flat tensor that holds all values as `dtype`, and the flat part of it for each.

    Each part begins where XLA can take it over; between parts are zeros.
    """
    unit = ALIGNMENT // dtype.itemsize
    pieces, sizes = [], []
    for value in values:
        pieces.append(value.reshape(-1))
        count = value.numel()
        sizes.append(math.ceil(count / unit) * unit)
        if gap := sizes[-1] - count:
            pieces.append(torch.zeros(gap, dtype=dtype))
    flat = memory.empty(sum(sizes), dtype)
    torch.cat(pieces, out=flat)
    parts = [part[: value.numel()] for part, value in zip(flat.split(sizes), values, strict=True)]
    return flat, parts


class Memory:
    """Memory for large tensors that is used again when neither torch nor XLA holds it."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor whose values are anything."""
        size = count * dtype.itemsize
        if size < REUSED:
            return torch.empty(count, dtype=dtype)
        return torch.empty(0, dtype=dtype).set_(self._storage(size), 0, (count,))

    def _storage(self, size: int) -> torch.UntypedStorage:
        free = [storage for storage in self._storages if _is_free(storage)]
        for storage in free:
            if size <= storage.nbytes() <= 2 * size:
                return storage
        total = size + sum(storage.nbytes() for storage in free)
        for storage in free:
            if total > KEPT:
                total -= storage.nbytes()
                self._storages.remove(storage)
        storage = torch.UntypedStorage(size)
        self._storages.append(storage)
        return storage


memory = Memory()
"""That of this process."""


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Whether nothing but this object holds the memory."""
    return torch._C._storage_Use_Count(storage._cdata) == 1
