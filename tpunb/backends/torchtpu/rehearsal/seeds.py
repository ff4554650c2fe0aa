"""The device's own random numbers: seeded with the CPU's, drawn apart from them.

As on CUDA, a generator's state is its seed and an offset, the count of what was drawn: 16 bytes,
which DTensor reads and changes, so that each rank draws its own part of a tensor. For each
operation the CPU's algorithm is seeded with both numbers.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C
_CpuGenerator: Any = _C.Generator
_swapped = threading.Lock()
_STATE = struct.Struct("<Qq")
_ALL_BITS = 2**64 - 1
_SPREAD = 0x9E3779B97F4A7C15
"""An odd constant that spreads successive offsets over all seeds (that of SplitMix64)."""


class TpuGenerator(_CpuGenerator):  # type: ignore[misc]
    """A generator of the device: the CPU's algorithm, in a state of its own."""

    _seed: int
    _offset: int

    def __new__(cls, device: Any = "tpu") -> TpuGenerator:
        made: TpuGenerator = _CpuGenerator.__new__(cls, "cpu")
        _made[made._cdata] = made
        return made.manual_seed(_CpuGenerator.initial_seed(made))

    @property
    def device(self) -> torch.device:
        return torch.device("tpu", 0)

    def manual_seed(self, seed: int) -> TpuGenerator:
        _CpuGenerator.manual_seed(self, seed)  # refuses what is no seed
        self._seed, self._offset = int(seed) & _ALL_BITS, 0
        return self

    def seed(self) -> int:
        self.manual_seed(_CpuGenerator.seed(self))
        return self._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(_STATE.pack(self._seed, self._offset)), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> TpuGenerator:
        state = bytes(new_state.cpu().tolist())
        if len(state) != _STATE.size:
            raise RuntimeError(f"RNG state is wrong size: {len(state)}, not {_STATE.size} bytes")
        self._seed, self._offset = _STATE.unpack(state)
        return self

    def clone_state(self) -> TpuGenerator:
        return TpuGenerator().set_state(self.get_state())

    def __reduce__(self) -> Any:
        return _rebuild, (self.get_state(),)

    def begin(self) -> TpuGenerator:
        """Get ready for one operation."""
        _CpuGenerator.manual_seed(self, (self._seed + self._offset * _SPREAD) & _ALL_BITS)
        return self

    def drew(self, result: Any) -> None:
        """Count what an operation drew, in steps of four as CUDA does."""
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        counts = [each.numel() for each in tensors if isinstance(each, torch.Tensor)]
        self._offset += (max(counts, default=1) + 3) // 4 * 4


def _rebuild(state: torch.Tensor) -> TpuGenerator:
    return TpuGenerator().set_state(state)


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
        generator = _chosen(args[position] if len(args) > position else kwargs.get("generator"))
        kwargs["generator"] = generator.begin()
        result = call(*args[:position], *args[position + 1 :], **kwargs)
        generator.drew(result)
        return result

    return draw


def _chosen(given: Any) -> TpuGenerator:
    if given is None:
        return default_generator()
    if given._cdata not in _made:
        raise RuntimeError(
            "Expected a generator of the TPU, but got one of the CPU: make it with "
            'torch.Generator(device="tpu")'
        )
    return _made[given._cdata]


def _with_default_state(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Of kernels that know one generator only: the CPU's default one, in the device's state."""
    mine, cpus = default_generator(), torch.default_generator
    with _swapped:
        kept = cpus.get_state()
        cpus.set_state(_CpuGenerator.get_state(mine.begin()))
        try:
            result = call(*args, **kwargs)
        finally:
            cpus.set_state(kept)
    mine.drew(result)
    return result
