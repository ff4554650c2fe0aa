"""The device's own random numbers: seeded with the CPU's, drawn apart from them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C
_CpuGenerator: Any = _C.Generator
_swapped = threading.Lock()


class TpuGenerator(_CpuGenerator):  # type: ignore[misc]
    """A generator of the device: the CPU's algorithm, in a state of its own."""

    def __new__(cls, device: Any = "tpu") -> TpuGenerator:
        made: TpuGenerator = _CpuGenerator.__new__(cls, "cpu")
        _made[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("tpu", 0)

    def clone_state(self) -> TpuGenerator:
        new = TpuGenerator()
        new.set_state(self.get_state())
        return new

    def __reduce__(self) -> Any:
        return _rebuild, (self.initial_seed(), self.get_state())


def _rebuild(seed: int, state: torch.Tensor) -> TpuGenerator:
    made = TpuGenerator()
    made.manual_seed(seed)
    made.set_state(state)
    return made


_made: weakref.WeakValueDictionary[int, TpuGenerator] = weakref.WeakValueDictionary()
"""By the address of the generator in C++: a kernel gets another object of Python for it."""
_default: list[TpuGenerator] = []


def default_generator() -> TpuGenerator:
    """The generator of operations that are not given one."""
    if not _default:
        _default.append(TpuGenerator())
        _default[0].manual_seed(torch.initial_seed())
    return _default[0]


def seed(op: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel of the CPU draw from the device's generator."""
    names = [argument.name for argument in op._schema.arguments]
    if "generator" not in names:
        return lambda *args, **kwargs: _with_default_state(call, args, kwargs)
    position = names.index("generator")

    def draw(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("generator")
        kwargs["generator"] = _chosen(given)
        return call(*args[:position], *args[position + 1 :], **kwargs)

    return draw


def _chosen(given: Any) -> Any:
    if given is None:
        return default_generator()
    if given._cdata not in _made:
        raise RuntimeError(
            "Expected a generator of the TPU, but got one of the CPU: make it with "
            'torch.Generator(device="tpu")'
        )
    return given


def _with_default_state(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Of kernels that know one generator only: the CPU's default one, in the device's state."""
    mine, cpus = default_generator(), torch.default_generator
    with _swapped:
        kept = cpus.get_state()
        cpus.set_state(mine.get_state())
        try:
            return call(*args, **kwargs)
        finally:
            mine.set_state(cpus.get_state())
            cpus.set_state(kept)
