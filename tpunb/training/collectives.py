"""The device and the few collectives that the helpers need, with any backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpunb.backends import current
from tpunb.training.ranks import rank_and_world


def accelerator() -> torch.device | None:
    """Return torch's device of this process besides the CPU and XLA: "tpu", "cuda" or None."""
    return torch.accelerator.current_accelerator(check_available=True)


def sum_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    """Sum tensors over all ranks, in place: one collective for each dtype, in XLA one for all.

    Raises RuntimeError with several ranks if they cannot reduce these tensors.
    """
    if tensors[0].device.type == "xla":
        xm: Any = sys.modules["torch_xla.core.xla_model"]
        xm.all_reduce(xm.REDUCE_SUM, list(tensors))
    elif rank_and_world()[1] > 1:
        _require_group(tensors[0])
        for dtype in {tensor.dtype: None for tensor in tensors}:
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            if len(alike) == 1:
                dist.all_reduce(alike[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, which have one shape, concatenated in order of rank."""
    if tensor.device.type == "xla":
        import torch_xla.core.xla_model as xm

        # Not pinned: upstream's pinned all_gather is a sum with zeros, which bool does not
        # support, and a different program on each rank. Layouts cannot differ if all ranks run
        # the same program. Not as a list: torch_xla (2.8, 2.9) crashes if it has only one tensor
        # of a type.
        gathered: torch.Tensor = xm.all_gather(tensor, pin_layout=False)
        return gathered
    world = rank_and_world()[1]
    if world == 1:
        return tensor
    _require_group(tensor)
    rows = tensor.new_empty((world * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(rows, tensor.contiguous())
    return rows


def _require_group(tensor: torch.Tensor) -> None:
    if dist.is_available() and dist.is_initialized():
        return
    world = rank_and_world()[1]
    if current.name() == "xla":
        raise RuntimeError(
            f"the tensors are on {tensor.device}, where the {world} ranks of this run cannot "
            "reduce them: call model.to(torch_xla.device()) before you make the optimizer"
        )
    raise RuntimeError(
        f"the {world} ranks of this run have no process group: begin the train cell with "
        "`torch.distributed.init_process_group()`"
    )
