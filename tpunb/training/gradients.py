"""`optimizer_step`: gradients of all ranks, their mean, clipping, and the step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from tpunb.training.place import rank_and_world
from tpunb.training.precision import watch_sums

_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    *,
    count: torch.Tensor | float | None = None,
    max_norm: float | None = None,
) -> torch.Tensor:
    """Reduce the gradients over all ranks, clip them, make the step; their norm before clipping.

    Without `count` the gradients are averaged over the ranks, as `xm.optimizer_step` does. With
    it they are those of a **sum** of losses (of several backward passes, too), and `count` says
    how many samples or tokens this rank has summed up: sums and counts of all ranks are added,
    then divided, so the mean is right where ranks have unequal numbers. If nothing counts, on
    any rank, gradients become 0.

    `max_norm`: the 2-norm of all gradients together, after the reduction, is at most this;
    it is computed in float32 also of bfloat16 gradients.

    The norm is a tensor of one element on the gradients' device, equal on all ranks: log it, and
    no step waits for it. Call it in all ranks. It does not reset the gradients.
    """
    gradients = _gradients(optimizer)
    if count is not None:
        return mean_step(optimizer, as_scalar(count, gradients[0]), max_norm)
    with torch.no_grad():
        add_up(gradients)
        world = rank_and_world()[1]
        norm = total_norm(gradients) / world
        return _step(optimizer, gradients, torch.full_like(norm, 1 / world), norm, max_norm)


def mean_step(
    optimizer: torch.optim.Optimizer,
    count: torch.Tensor,
    max_norm: float | None,
    *others: torch.Tensor,
) -> torch.Tensor:
    """A step down gradients of sums; `count` and the `others` become those of all ranks."""
    with torch.no_grad():
        gradients = _gradients(optimizer)
        # On the way with the gradients: no collective of their own.
        add_up([*gradients, count, *others])
        scale = one_by(count)
        return _step(optimizer, gradients, scale, total_norm(gradients) * scale, max_norm)


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise ValueError("optimizer_step: no parameter has a gradient: call loss.backward() first")
    return gradients


def _step(
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[torch.Tensor],
    scale: torch.Tensor,
    norm: torch.Tensor,
    max_norm: float | None,
) -> torch.Tensor:
    if max_norm is not None:
        scale = scale * (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    watch_sums(optimizer)
    optimizer.step()
    return norm


def add_up(tensors: Sequence[torch.Tensor]) -> None:
    """Add the tensors of all ranks, in place: one collective for all of them.

    Raises RuntimeError where there are several ranks and the tensors are on none of their cores.
    """
    if tensors[0].device.type == "xla":
        xm: Any = sys.modules["torch_xla.core.xla_model"]
        xm.all_reduce(xm.REDUCE_SUM, list(tensors))
    elif (world := rank_and_world()[1]) > 1:
        raise RuntimeError(
            f"the gradients are on {tensors[0].device}, where the {world} ranks of this run cannot "
            "add them up: model.to(torch_xla.device()) before the optimizer is made"
        )


def as_scalar(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """A number as a new tensor of one element on the device of `like`, in float32 at least.

    Made on the CPU and sent, because a number that is part of the graph would be a new graph
    for each value.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.as_tensor(value).detach().to(like.device, dtype, copy=True)


def one_by(count: torch.Tensor) -> torch.Tensor:
    """1 / count, and 0 where nothing counts."""
    reciprocal = 1 / count.clamp(min=torch.finfo(count.dtype).tiny)
    return torch.where(count > 0, reciprocal, torch.zeros_like(count))


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all elements together, in float32 or, of float64, in float64."""
    norms = [
        torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
