"""Values of XLA tensors: copied to the CPU in one transfer, kept for later, without wrappers.

Importing this module imports neither torch nor torch_xla.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from tpunb.backends.xla import runtime, spmd
from tpunb.backends.xla.private_names import SHARDED
from tpunb.utils.modules import is_a


def start_pending_work() -> None:
    """Start the device's pending work, in each rank that calls `save`.

    The graph of a step may contain a collective, which all ranks must run in the same graph, so
    it is not left to the ranks that write. After an exception nothing is started: the ranks may be
    at different places, and work that the state does not need could wait for a rank forever.
    """
    xla = runtime.running_module()
    if xla is not None and sys.exc_info()[0] is None:
        xla.sync()


def unwrap_sharded(tensor: Any) -> Any:
    """The tensor inside an `XLAShardedTensor`; any other tensor unchanged.

    `xs.mark_sharding` returns such a wrapper, and so does every operation on one, including
    gradients and optimizer state (measured on torch_xla 2.9). Inside is the whole tensor:
    reading it gathers all shards.
    """
    module = sys.modules.get("torch_xla.distributed.spmd.xla_sharded_tensor")
    if module is None or not spmd.is_on(os.environ):
        return tensor
    torch = sys.modules["torch"]
    inner = tensor
    if torch._is_functional_tensor(inner):
        # The result of an operation, or of a change in place, has one more wrapper.
        inner = _from_functional(inner)
    return inner.global_tensor if isinstance(inner, module.XLAShardedTensor) else tensor


def is_dtensor(value: object) -> bool:
    """True for a DTensor of torch.distributed, of which each rank may have a part.

    Those of SPMD are DTensors, too (torch_xla 2.9), but this process has all of them.
    """
    return is_a(value, "torch.distributed.tensor", "DTensor") and unwrap_sharded(value) is value


def is_shard(parameter: Any) -> bool:
    """True for a parameter of which each rank may hold another part: of FSDP, or a DTensor."""
    torch = sys.modules["torch"]
    plain = type(parameter) in (torch.Tensor, torch.nn.Parameter)
    return not plain or hasattr(parameter, SHARDED)


def are_computed(tensors: Sequence[Any]) -> bool:
    """True if the values of all these tensors can be read without running a program."""
    xla = runtime.running_module()
    lazy = [each for each in tensors if each.device.type == "xla"]
    return not lazy or not any(xla._XLAC._check_tensor_need_materialization(lazy))


def snapshot(tensor: Any) -> Any:
    """A tensor with the value that an XLA tensor has now, without computing it.

    Inside an XLA tensor is the tensor of the computation, which in-place changes do not affect. A
    clone would work as well, but would add an output to the step's graph: a second compilation if
    only some steps are logged. A tensor that was changed in place before, as in `total += loss`, is
    cloned, because the next change reuses its memory. (Tensors of inference mode do not record
    whether they were changed.)
    """
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    if not torch._is_functional_tensor(tensor):
        return tensor.clone()
    if tensor.is_inference() or tensor._version > 0:
        tensor = tensor.clone()
    return _from_functional(tensor)


def _from_functional(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


class CpuCopies:
    """CPU copies of a state's tensors that are on other devices, one per tensor."""

    def __init__(self, state: Any) -> None:
        """Copy the tensors in nested dicts, lists and tuples. Waits until they are computed.

        One transfer for all: one by one takes 1.5 to 15 times as long.
        """
        self._copies: dict[tuple[str, int], Any] = {}
        self._kept: list[Any] = []
        self.size = 0
        """Bytes of all tensors, including those on the CPU; shared tensors count once."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        elsewhere: dict[tuple[str, int], Any] = {}
        sizes: dict[tuple[str, int], int] = {}
        for tensor in _tensors(state, torch.Tensor):
            sizes[_identity(tensor)] = tensor.numel() * tensor.element_size()
            if tensor.device.type != "cpu":
                elsewhere.setdefault(_identity(tensor), unwrap_sharded(tensor).detach())
        self.size = sum(sizes.values())
        if elsewhere:
            # Kept: the id of a tensor that is freed may be given to another.
            self._kept = list(elsewhere.values())
            copies = map(unwrap_sharded, torch._to_cpu(self._kept))
            self._copies = dict(zip(elsewhere, copies, strict=True))

    def __call__(self, tensor: Any) -> Any:
        """The CPU copy of a tensor; the copy of a Parameter is a Parameter."""
        key = _identity(tensor)
        if key not in self._copies:  # the tensor was inside an object
            self._kept.append(tensor)
            self._copies[key] = unwrap_sharded(tensor.detach().cpu())
        copy = self._copies[key]
        torch = sys.modules["torch"]
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.detach().requires_grad_(tensor.requires_grad)


def _identity(tensor: Any) -> tuple[str, int]:
    """Equal for a tensor and its detached copies, so that tied weights stay tied."""
    if tensor.device.type == "xla":
        xla: Any = sys.modules["torch_xla"]
        return "xla", xla._XLAC._xla_get_tensor_id(unwrap_sharded(tensor))
    return "object", id(tensor)


def _tensors(state: Any, kind: type) -> list[Any]:
    """All tensors in nested dicts, lists and tuples; each container is searched once."""
    tensors: list[Any] = []
    seen: set[int] = set()
    pending = [state]
    while pending:
        value = pending.pop()
        if isinstance(value, kind):
            tensors.append(value)
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
    return tensors
