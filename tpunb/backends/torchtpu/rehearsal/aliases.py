"""The same memory as a tensor of the CPU and as a tensor of the device.

DLPack hands memory from one library to another with a header that names the device. torch calls
the device type kDLExtDev what PrivateUse1 is called here: a capsule of a CPU tensor with that type
becomes a genuine PrivateUse1 tensor over the same memory, and the other way round.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

_C: Any = torch._C
_DEVICE_TYPE = 8
"""Offset of the device type in a DLManagedTensor, in bytes: after its pointer (dlpack.h 1.x)."""
_CPU, _EXTENSION = 1, 12  # kDLCPU, kDLExtDev

# All of this process's memory, as machine words and as integers of a device type: indexing is six
# times as fast as a call of PyCapsule_GetPointer through ctypes (0.1 and 0.7 us). Linux gives
# programs the lower 47 bits of the addresses on x86, and 48 on ARM.
_words: Any = (ctypes.c_size_t * (1 << 45)).from_address(0)
_integers: Any = (ctypes.c_int32 * (1 << 46)).from_address(0)
_HEADER = object.__basicsize__
"""What PyCapsule has before its first field, the pointer; `check_layout` looks whether it has."""

_to_dlpack: Any = _C._to_dlpack
_from_dlpack: Any = _C._from_dlpack


def check_layout() -> bool:
    """Whether capsules and DLPack's header are laid out as this module assumes."""
    value = torch.empty(2)
    capsule = _to_dlpack(value)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor")
    if sys.byteorder != "little" or _words[id(capsule) + _HEADER >> 3] != address:
        return False
    data = _words[address >> 3]
    device_type = _integers[address + _DEVICE_TYPE >> 2]
    return bool(data == value.data_ptr() and device_type == _CPU)


def bare_cpu(value: torch.Tensor) -> torch.Tensor:
    """`to_cpu` of a tensor without a conjugate or a negative bit."""
    capsule = _to_dlpack(value)
    _integers[_words[id(capsule) + _HEADER >> 3] + _DEVICE_TYPE >> 2] = _CPU
    alias: torch.Tensor = _from_dlpack(capsule)
    return alias


def bare_tpu(value: torch.Tensor) -> torch.Tensor:
    """`to_tpu` of a tensor without a conjugate or a negative bit."""
    capsule = _to_dlpack(value)
    _integers[_words[id(capsule) + _HEADER >> 3] + _DEVICE_TYPE >> 2] = _EXTENSION
    alias: torch.Tensor = _from_dlpack(capsule)
    return alias


def to_cpu(value: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on the device as a CPU tensor, without gradients and not copied."""
    alias = bare_cpu(value)
    if value.is_conj():  # DLPack has no bits for these two
        alias = alias.conj()
    negative: Any = alias
    return negative._neg_view() if value.is_neg() else alias


def to_tpu(value: torch.Tensor) -> torch.Tensor:
    """The memory of a CPU tensor as a tensor on the device, without gradients and not copied."""
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    return bare_tpu(value)


def on_tpu(value: torch.Tensor) -> bool:
    """Whether a tensor is on the device `tpu`."""
    return value.device.type == "tpu"
