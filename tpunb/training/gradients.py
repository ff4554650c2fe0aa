"""The step of an optimizer over all ranks, after one backward pass or several.

`optimizer_step` reduces and clips the gradients; `Accumulation` does so for big batches that come
in small pieces, with one collective and one step for each batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpunb.training.masks import weighted_sums
from tpunb.training.precision import watch_sums
from tpunb.training.ranks import rank_and_world

_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    *,
    count: torch.Tensor | float | None = None,
    max_norm: float | None = None,
) -> torch.Tensor:
    """Reduce the gradients over all ranks, clip them and step; returns their norm before clipping.

    Without `count` the gradients are averaged over the ranks, as `xm.optimizer_step` does. With
    it they are the gradients of a **sum** of losses (also of several backward passes), and
    `count` is the number of samples or tokens in this rank's sum: sums and counts of all ranks
    are added, then divided, so the mean is right where ranks have unequal numbers. If nothing
    counts on any rank, gradients become 0.

    `max_norm`: the largest 2-norm of all gradients together, after the reduction; it is computed
    in float32, for bfloat16 gradients too.

    The norm is a tensor of one element on the gradients' device, equal on all ranks: it can be
    logged without a step waiting for it. Call it in all ranks. It does not reset the gradients.
    """
    gradients = _gradients(optimizer)
    if count is not None:
        return mean_step(optimizer, as_scalar(count, gradients[0]), max_norm)
    with torch.no_grad():
        sum_over_ranks(gradients)
        world = rank_and_world()[1]
        norm = total_norm(gradients) / world
        return _step(optimizer, gradients, torch.full_like(norm, 1 / world), norm, max_norm)


@dataclass(frozen=True)
class Update:
    """One step of the optimizer. Its tensors have one element and are equal on all ranks."""

    loss: torch.Tensor
    """The mean over everything that counted, on all ranks."""
    norm: torch.Tensor
    """Of all gradients together, before clipping."""
    count: torch.Tensor
    """How many losses counted, on all ranks."""


class Accumulation:
    """Gradient accumulation: steps of an optimizer over several backward passes each.

        accumulation = Accumulation(optimizer, every=4, max_norm=1.0)
        for x, y, mask in batches:
            losses = F.cross_entropy(model(x), y, reduction="none")
            update = accumulation.backward(losses, mask)
            if update:
                scheduler.step()
                tpunb.log(step, loss=update.loss, norm=update.norm)
        accumulation.finish()

    Each step equals one backward pass over the whole batch: the mean over every loss that
    counts, in all pieces and on all ranks, however unevenly they are spread. It resets the
    gradients, and on XLA calls `torch_xla.sync()` after each piece, so that all pieces are one
    program, compiled once.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, every: int, *, max_norm: float | None = None
    ) -> None:
        """`every`: pieces per step, on each rank. `max_norm`: see `optimizer_step`."""
        if every < 1:
            raise ValueError(f"Accumulation: every={every}: a step needs at least one piece")
        self.optimizer = optimizer
        self.every = every
        self.max_norm = max_norm
        self._pieces = 0
        self._totals: list[torch.Tensor] = []
        """Sum and count of the losses of this rank, since the last step."""
        self._zeros: dict[torch.Tensor, torch.Tensor] = {}
        self._used: set[torch.Tensor] = set()

    def backward(self, losses: torch.Tensor, mask: torch.Tensor | None = None) -> Update | None:
        """The backward pass of one piece, and each `every` pieces the step, which it returns.

        `losses`: one for each sample or token, not averaged (`reduction="none"`). `mask`, of the
        same shape: which of them count (bool, or weights). A mean instead of losses counts as
        one loss.

        Call it equally often on all ranks: the step is a collective.
        """
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        if mask is None:
            total, count = losses.sum(), as_scalar(losses.numel(), losses)
        elif mask.shape == losses.shape:
            total, count = weighted_sums(losses, mask)
        else:
            raise ValueError(
                f"Accumulation: a mask of shape {list(mask.shape)} for losses of shape "
                f"{list(losses.shape)}: it needs one number for each loss, so compute them with "
                'reduction="none"'
            )
        if not self._pieces:
            self._begin(total)
        total.backward()
        with torch.no_grad():
            self._totals[0].add_(total)
            self._totals[1].add_(count)
        self._pieces += 1
        if self._pieces == self.every:
            return self.finish()
        _mark_step(total)
        return None

    def finish(self) -> Update | None:
        """Step with the pieces left over, for example after the last batch of an epoch.

        Returns None if there are none. Call it on all ranks or on none.
        """
        if not self._pieces:
            return None
        loss, count = self._totals
        if self.every > 1:
            _mark_step(loss)  # the step in a program of its own: the piece's stays the same
        for parameter in self._zeros:
            if parameter not in self._used:
                parameter.grad = None  # never used: the optimizer skips it
        norm = mean_step(self.optimizer, count, self.max_norm, loss)
        update = Update(loss * reciprocal_or_zero(count), norm, count.clone())
        with torch.no_grad():
            for parameter, zeros in self._zeros.items():
                parameter.grad = zeros.zero_()
            loss.zero_()
            count.zero_()
        self._pieces = 0
        self._used.clear()
        _mark_step(loss)
        return update

    def _begin(self, loss: torch.Tensor) -> None:
        """Gradients of 0 from the start: without them, the first piece is another program."""
        new = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter not in self._zeros
        ]
        for parameter in new:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                self._used.add(parameter)
            self._zeros[parameter] = parameter.grad
            parameter.register_post_accumulate_grad_hook(self._used.add)
        if not self._totals:
            self._totals = [as_scalar(0.0, loss), as_scalar(0.0, loss)]
        if new:
            _mark_step(loss)


def _mark_step(tensor: torch.Tensor) -> None:
    if tensor.device.type == "xla":
        xla: Any = sys.modules["torch_xla"]
        xla.sync()


def mean_step(
    optimizer: torch.optim.Optimizer,
    count: torch.Tensor,
    max_norm: float | None,
    *others: torch.Tensor,
) -> torch.Tensor:
    """The step for gradients of sums; `count` and the `others` become those of all ranks."""
    with torch.no_grad():
        gradients = _gradients(optimizer)
        # With the gradients: no collective of their own.
        sum_over_ranks([*gradients, count, *others])
        scale = reciprocal_or_zero(count)
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


def sum_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    """Add the tensors of all ranks, in place, in one collective.

    Raises RuntimeError with several ranks if the tensors are not on an XLA device.
    """
    if tensors[0].device.type == "xla":
        xm: Any = sys.modules["torch_xla.core.xla_model"]
        xm.all_reduce(xm.REDUCE_SUM, list(tensors))
    elif (world := rank_and_world()[1]) > 1:
        raise RuntimeError(
            f"the gradients are on {tensors[0].device}, where the {world} ranks of this run cannot "
            "reduce them: call model.to(torch_xla.device()) before you make the optimizer"
        )


def as_scalar(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """A number as a new tensor of one element on the device of `like`, in float32 at least.

    Made on the CPU and sent, because a number that is part of the graph would be a new graph
    for each value.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.as_tensor(value).detach().to(like.device, dtype, copy=True)


def reciprocal_or_zero(count: torch.Tensor) -> torch.Tensor:
    """1 / count, or 0 where nothing counts."""
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
