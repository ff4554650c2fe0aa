"""What is noted of one operation: where it was called, what went in and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tpunb.debug.place import Place

_MOST = 64
"""Members of a list or tuple that are looked at."""


class Shape(NamedTuple):
    """A tensor as an argument or a result."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        """'32×784 float32'."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{'×'.join(map(str, self.sizes))} {kind}" if self.sizes else f"a single {kind}"


class Op(NamedTuple):
    """A call of one of torch's functions with a tensor on the XLA device."""

    name: str
    place: Place | None
    """The innermost line of the notebook; None if none called it."""
    optimizer: bool
    """It was called by an optimizer's step."""
    given: tuple[object, ...]
    """Arguments: shapes, numbers, words; tuples of them; the names of other types."""
    made: object

    @property
    def key(self) -> tuple[str, Place | None]:
        """What it is, whatever it was given."""
        return self.name, self.place

    @property
    def moves(self) -> bool:
        """It brings a tensor from the host to the device, which is no part of a program."""
        return on_xla(self.made) and on_cpu(self.given) and not on_xla(self.given)


def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """The arguments of a call."""
    if not kwargs:
        return tuple([_of(value, 2) for value in args])
    return (*[_of(value, 2) for value in args], *[(k, _of(v, 2)) for k, v in kwargs.items()])


def result(value: Any) -> object:
    """The result of a call."""
    return _of(value, 1)


def on_xla(described: object) -> bool:
    """Whether a tensor on the XLA device is among them."""
    return _on("xla", described)


def on_cpu(described: object) -> bool:
    """Whether a tensor on the CPU is among them."""
    return _on("cpu", described)


def _on(device: str, described: object) -> bool:
    if isinstance(described, Shape):
        return described.device == device
    return isinstance(described, tuple) and any(_on(device, value) for value in described)


def _of(value: Any, depth: int) -> object:
    if isinstance(value, torch.Tensor):
        return Shape(tuple(value.shape), value.dtype, value.device.type)
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return str(value)
    if isinstance(value, (list, tuple)) and depth:
        return tuple([_of(member, depth - 1) for member in value[:_MOST]])
    if isinstance(value, slice):
        return ("slice", _of(value.start, 0), _of(value.stop, 0), _of(value.step, 0))
    return type(value).__name__
