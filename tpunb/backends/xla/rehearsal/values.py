"""Values of XLA tensors: read, put on the device, and written into existing tensors.

Between XLA and torch's CPU tensors they move without copies: both are the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from tpunb.backends.rehearsal import call
from tpunb.backends.rehearsal.buffers import ALIGNMENT, memory
from tpunb.backends.xla.rehearsal import divergence, launches

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


def read_values(tensors: Sequence[torch.Tensor], *, reduced: bool = False) -> list[torch.Tensor]:
    """The values on the CPU, in XLA's own memory: never write to them.

    Computes pending work, before waiting for the others, so that an interrupt or an error in a
    long computation finds this rank outside the collective. `torch_xla.sync()` is not used, because
    it would run step closures in the middle of a step. `torch_xla.compile(full_graph=True)` forbids
    programs that end within its block, as this one does. On a TPU the program continues after the
    collective, so in a rehearsal it is allowed. `reduced`: see `hash_program`.
    """
    divergence.programs.hash_program(tensors, reduced=reduced)
    if call.is_other_thread():
        # Computing all live tensors would include those that another thread is just making, which
        # then fails with "Check failed: tensor_data" (torch_xla 2.9).
        values: list[torch.Tensor] = _XLAC._xla_get_cpu_tensors(list(tensors))
        return values
    allowed = _XLAC._get_allow_execution()
    begun = launches.count_outputs()
    _XLAC._set_allow_execution(True)
    try:
        if needed := sum(_XLAC._check_tensor_need_materialization(tensors)):
            _XLAC._xla_sync_live_tensors("", [], True)
            launches.launches.note_computed(launches.count_outputs() - begun, needed)
        else:
            _XLAC._xla_wait_device_ops([])
        return from_xla(tensors)
    finally:
        _XLAC._set_allow_execution(allowed)


def on_device(
    value: torch.Tensor, like: torch.Tensor, *, gradient: bool, of_all: bool = True
) -> torch.Tensor:
    """A new XLA tensor that takes over the memory of `value`: do not use `value` again.

    With `gradient`, it is a leaf with the requires_grad of `like`. `of_all` is False if not all
    ranks took part in the collective.
    """
    tensor = to_xla(value)
    if of_all:
        launches.launches.add_results([tensor])
    return tensor.requires_grad_() if gradient and like.requires_grad else tensor


@torch.no_grad()
def overwrite(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Replace the values of tensors, also by other shapes, as torch_xla's collectives do.

    Views of a tensor see the change. Its base does not, and restores its old value at the next
    change (seen in torch_xla 2.9 with one replica). Autograd does not see the change. The
    tensors take over the memory of the values: do not use those again.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    news: list[torch.Tensor] = []
    for tensor, value in zip(tensors, values, strict=True):
        new = to_xla(value)
        news.append(new)
        if value.shape != tensor.shape:
            tensor.data = new.to(tensor.dtype)
        elif tensor._is_view() and torch._is_functional_tensor(tensor):
            torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
            torch._from_functional_tensor(tensor).copy_(new)
        else:
            # Not as above: an accumulated gradient is not a view, but torch's functional wrapper
            # of it has a base of its own, whose old value would return with the next change.
            targets.append(tensor.data)
            sources.append(new)
    launches.launches.add_results(news, in_place=True)
    if targets:
        torch._foreach_copy_(targets, sources)
