"""Values of XLA tensors: to the CPU, to the device, into a tensor that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_xla

from tpunb.worker.rehearsal import divergence, transfer

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]


def read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values on the CPU, in XLA's own memory: never write to them.

    Computes what is pending, and runs no step closures. Before the others are waited for: an
    interrupt or an error in a long computation finds this rank outside the collective. Not
    `torch_xla.sync()`: that would run closures in the middle of a step.
    `torch_xla.compile(full_graph=True)` forbids programs that end within its block, as this one
    does; on a TPU it goes on behind the collective, so it is not the user's.
    """
    divergence.mine.look(tensors)
    allowed = _XLAC._get_allow_execution()
    _XLAC._set_allow_execution(True)
    try:
        if any(_XLAC._check_tensor_need_materialization(tensors)):
            _XLAC._xla_sync_live_tensors("", [], True)
        else:
            _XLAC._xla_wait_device_ops([])
        return transfer.from_xla(tensors)
    finally:
        _XLAC._set_allow_execution(allowed)


def on_device(value: torch.Tensor, like: torch.Tensor, *, gradient: bool) -> torch.Tensor:
    """A new XLA tensor in the memory of `value`: do not use that again.

    It may require grad as `like` does, of which it is no part.
    """
    tensor = transfer.to_xla(value)
    return tensor.requires_grad_() if gradient and like.requires_grad else tensor


@torch.no_grad()
def overwrite(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Give tensors other values, of their shapes or others, as torch_xla's collectives do.

    They replace the value of a tensor itself. Its views follow; what it is a view of does
    not, and takes its old value back at the next change (seen in torch_xla 2.9 with one
    replica). Autograd does not see the change. The memory of the values becomes the
    tensors': do not use it again.
    """
    plain: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for tensor, value in zip(tensors, values, strict=True):
        new = transfer.to_xla(value)
        if value.shape != tensor.shape:
            tensor.data = new.to(tensor.dtype)
        elif tensor._is_view() and torch._is_functional_tensor(tensor):
            torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
            torch._from_functional_tensor(tensor).copy_(new)
        else:
            # Not as above: a gradient that was accumulated is no view, but torch's wrapper of it
            # has a base of its own, whose old value would come back with the next change.
            plain.append(tensor.data)
            theirs.append(new)
    if plain:
        torch._foreach_copy_(plain, theirs)
