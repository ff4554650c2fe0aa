"""Moves values between XLA and torch's CPU tensors without copies: both are the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from tpunb.backends.rehearsal.buffers import ALIGNMENT, memory

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]

_get_cpu_tensors = _XLAC._xla_get_cpu_tensors
"""torch_xla's own function: reads of the rehearsal do not count as reads of the user's code."""


def from_xla(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of computed tensors, in XLA's own memory: never write to them."""
    try:
        _XLAC._get_tensors_handle(tensors)  # _to_dlpack ends the process if one has no memory
    except RuntimeError:  # a tensor on the CPU, or a number that XLA keeps in its programs
        plain = [tensor.detach() for tensor in tensors]
        values: list[torch.Tensor] = _get_cpu_tensors(plain)
        return values
    return [from_dlpack(_XLAC._to_dlpack(tensor)) for tensor in tensors]


def to_xla(value: torch.Tensor) -> torch.Tensor:
    """A new XLA tensor that takes over the memory of `value`: do not use `value` again."""
    if value.data_ptr() % ALIGNMENT or not value.is_contiguous():
        value = value.clone(memory_format=torch.contiguous_format)
    # Not a view of another tensor: torch 2.8 would have XLA hold that one instead, see `lend`.
    value = value.data
    tensor: torch.Tensor = _XLAC._from_dlpack(to_dlpack(value))
    memory.lend(value)
    return tensor
