"""Reducing values of several ranks as XLA does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from tpunb.worker.rehearsal.calls import Call
from tpunb.worker.rehearsal.refusals import NotRehearsedError
from tpunb.worker.rehearsal.transfer import memory

_OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mul": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""As XLA's: min and max of a NaN are NaN (not in gloo), bool is added by `or`."""
_FLOATS = (torch.float64, torch.float32, torch.complex64, torch.complex128)
_INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_REDUCED_AS = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int16: torch.int32,
    **{dtype: dtype for dtype in _FLOATS + _INTEGERS},
}
"""The type in which values are reduced. A TPU reduces 16-bit floats in 32 bits as well."""


def check(call: Call, reduce_type: str, tensors: Sequence[torch.Tensor]) -> str:
    """What XLA refuses about this reduction, or ''. Raises NotRehearsedError."""
    if reduce_type not in _OPERATIONS:
        return f"there is no reduce type {reduce_type!r}"
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        if dtype not in _REDUCED_AS:
            raise NotRehearsedError(f"{call.operation} of {dtype}")
        if reduce_type in ("and", "or") and (dtype.is_floating_point or dtype.is_complex):
            return f"{reduce_type!r} needs bool or integer tensors"
        if reduce_type in ("min", "max") and dtype.is_complex:
            return f"complex numbers have no {reduce_type}"
    return ""


def wire_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of another are reduced."""
    return _REDUCED_AS[dtype]


def reduced(reduce_type: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts of all ranks reduced, in the order of the ranks, in their `wire_type`."""
    wide = (part.to(_REDUCED_AS[part.dtype]) for part in parts)
    return functools.reduce(_OPERATIONS[reduce_type], wide)


def scaled(value: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """A flat `value` as `dtype`, times `scale`, which XLA first turns from float32 into that type.

    So integers times 0.5 are 0 (cross_replica_reduces.cpp; seen with one replica).
    """
    if value.dtype != dtype:
        value = memory.empty(value.numel(), dtype).copy_(value)
    return value if scale == 1 else value.mul_(torch.tensor(scale).to(dtype))


def scale_text(scale: float) -> str:
    """For the comparison of calls."""
    return "" if scale == 1 else f"scale {scale:g}"
