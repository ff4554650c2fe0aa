"""Values of XLA tensors: to the CPU, to the device, into a tensor that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_xla

from tpunb.worker.rehearsal import divergence

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]


def read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values on the CPU. Computes what is pending, and runs no step closures.

    Before the others are waited for: an interrupt or an error in a long computation finds this
    rank outside the collective. Not `torch_xla.sync()`: that would run closures in the middle
    of a step. `torch_xla.compile(full_graph=True)` forbids programs that end within its block,
    as this one does; on a TPU it goes on behind the collective, so it is not the user's.
    """
    plain = [tensor.detach() for tensor in tensors]
    divergence.mine.look(plain)
    allowed = _XLAC._get_allow_execution()
    _XLAC._set_allow_execution(True)
    try:
        _XLAC._xla_sync_live_tensors("", [], False)
        values: list[torch.Tensor] = _XLAC._xla_get_cpu_tensors(plain)
    finally:
        _XLAC._set_allow_execution(allowed)
    return values


def on_device(value: torch.Tensor, like: torch.Tensor, *, gradient: bool) -> torch.Tensor:
    """A new tensor where `like` is; it may require grad as `like` does, of which it is no part."""
    tensor = value.to(like.device)
    return tensor.requires_grad_() if gradient and like.requires_grad else tensor


@torch.no_grad()
def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor another value, of its shape or another, as torch_xla's collectives do.

    They replace the value of the tensor itself. Its views follow; what it is a view of does
    not, and takes its old value back at the next change (seen in torch_xla 2.9 with one
    replica). Autograd does not see the change.
    """
    new = value.to(tensor.device)
    if new.shape != tensor.shape:
        tensor.data = new.to(tensor.dtype)
    elif torch._is_functional_tensor(tensor):
        torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
        torch._from_functional_tensor(tensor).copy_(new)
    else:  # XLA_DISABLE_FUNCTIONALIZATION=1
        tensor.data.copy_(new)
