"""Tensors of a state, from XLA devices (or others) to the CPU, in one transfer.

Private names, checked on torch and torch_xla 2.8 and 2.9: `torch._to_cpu` (the operator that
moves a list of tensors at once; one by one takes 1.5 to 15 times as long) and
`torch_xla._XLAC._xla_get_tensor_id` (the same for a tensor and its detached selves, so that
tied weights stay tied), `torch_xla._XLAC._xla_runtime_is_initialized`.
"""

from __future__ import annotations

import sys
from typing import Any

from tpunb import spmd

TORCH = ("_to_cpu",)
XLAC = ("_xla_get_tensor_id", "_xla_runtime_is_initialized")


def settle() -> None:
    """Start what the device has pending, in each rank that calls `save`.

    The graph of a step may hold a collective, which needs all ranks, in the same graph: so it
    is not left to the ranks that write. After an exception nothing is started here: each rank
    may have been somewhere else, and what the state does not need may wait for a rank forever.
    """
    xla = runtime()
    if xla is not None and sys.exc_info()[0] is None:
        xla.sync()


def runtime() -> Any:
    """The module torch_xla if this process uses a device, else None."""
    xla: Any = sys.modules.get("torch_xla")
    return xla if xla is not None and xla._XLAC._xla_runtime_is_initialized() else None


class ToCpu:
    """The CPU copies of a state's tensors on other devices: one for each tensor."""

    def __init__(self, state: Any) -> None:
        """Copy those that dicts, lists and tuples lead to. Waits until they are computed."""
        self._copies: dict[tuple[str, int], Any] = {}
        self._kept: list[Any] = []
        self.size = 0
        """Bytes of all tensors that were found, also of those on the CPU: shared ones once."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        found: dict[tuple[str, int], Any] = {}
        sizes: dict[tuple[str, int], int] = {}
        for tensor in _tensors(state, torch.Tensor):
            sizes[_identity(tensor)] = tensor.numel() * tensor.element_size()
            if tensor.device.type != "cpu":
                found.setdefault(_identity(tensor), spmd.plain(tensor).detach())
        self.size = sum(sizes.values())
        if found:
            # Kept: the id of a tensor that is freed may be given to another.
            self._kept = list(found.values())
            copies = map(spmd.plain, torch._to_cpu(self._kept))
            self._copies = dict(zip(found, copies, strict=True))

    def __call__(self, tensor: Any) -> Any:
        """The CPU copy of a tensor; a Parameter's is one."""
        key = _identity(tensor)
        if key not in self._copies:  # it was inside an object
            self._kept.append(tensor)
            self._copies[key] = spmd.plain(tensor.detach().cpu())
        copy = self._copies[key]
        torch = sys.modules["torch"]
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.detach().requires_grad_(tensor.requires_grad)


def _identity(tensor: Any) -> tuple[str, int]:
    """The same for tensors that share all their elements, where that can be told."""
    if tensor.device.type == "xla":
        xla: Any = sys.modules["torch_xla"]
        return "xla", xla._XLAC._xla_get_tensor_id(spmd.plain(tensor))
    return "object", id(tensor)


def _tensors(state: Any, kind: type) -> list[Any]:
    """All tensors in dicts, lists and tuples, however deep; each container is looked at once."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return found
