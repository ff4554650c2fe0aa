"""Optimizer steps over all ranks, after one backward pass or several.

`optimizer_step` reduces and clips the gradients. `Accumulation` does the same for large batches
that are computed in pieces, with one collective and one optimizer step for each batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpunb.backends.xla.tensors import is_dtensor
from tpunb.training.collectives import sum_over_ranks
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
    """Reduce the gradients over all ranks, clip them and step the optimizer.

        loss.backward()
        norm = optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()

    Call it on all ranks: it is a collective. It does not reset the gradients.

    Without `count` the gradients are averaged over the ranks, as `xm.optimizer_step` does. With
    `count` they must be the gradients of a **sum** of losses, from one backward pass or several,
    and `count` is the number of samples or tokens in this rank's sum: gradients and counts are
    summed over all ranks, then divided. So the mean is right even if the ranks' counts differ. If
    the counts of all ranks are 0, the gradients become 0.

    `max_norm`: the gradients are scaled down to this 2-norm, taken over all of them together after
    the reduction and computed in float32, even for bfloat16 gradients.

    Return the norm before clipping: a tensor of one element on the gradients' device, equal on all
    ranks. It can be logged without making a step wait for it.

    With DistributedDataParallel, whose gradients are averaged already, the result is the same.

    Raises ValueError if no parameter has a gradient, TypeError for the parts of gradients that
    `fully_shard` or a DTensor leaves on each rank, RuntimeError if the ranks cannot reduce them.
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
    """One optimizer step of `Accumulation`. Its tensors have one element, equal on all ranks."""

    loss: torch.Tensor
    """The mean of all losses of the step that count, over all ranks."""
    norm: torch.Tensor
    """The 2-norm of all gradients together, before clipping."""
    count: torch.Tensor
    """The number of losses that count (with weights: their sum), over all ranks."""


class Accumulation:
    """Gradient accumulation: one optimizer step after every few backward passes.

        accumulation = Accumulation(optimizer, every=4, max_norm=1.0)
        for x, y, mask in batches:
            losses = F.cross_entropy(model(x), y, reduction="none")
            update = accumulation.backward(losses, mask)
            if update:
                scheduler.step()
                tpunb.log(step, loss=update.loss, norm=update.norm)
        accumulation.finish()

    Each step equals one backward pass over the whole batch: the loss is the mean of all losses
    that count, in all pieces and on all ranks, however unevenly they are spread. Gradients are
    reset after each step. On XLA, `torch_xla.sync()` is called after each piece, so that all
    pieces run the same program, compiled once.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, every: int, *, max_norm: float | None = None
    ) -> None:
        """`every`: pieces per step, on each rank. `max_norm`: see `optimizer_step`.

        Raises ValueError if `every` is less than 1.
        """
        if every < 1:
            raise ValueError(f"Accumulation: every={every}: a step needs at least one piece")
        self.optimizer = optimizer
        self.every = every
        self.max_norm = max_norm
        self._pieces = 0
        self._totals: list[torch.Tensor] = []
        """Sum and count of this rank's losses since the last step."""
        self._zeros: dict[torch.Tensor, torch.Tensor] = {}
        self._used: set[int] = set()
        """The id() of parameters that have had a gradient. A set of parameters, which have hooks
        that hold it, would be freed by the garbage collector only."""

    def backward(self, losses: torch.Tensor, mask: torch.Tensor | None = None) -> Update | None:
        """Run the backward pass of one piece; after every `every` pieces, step the optimizer.

        `losses`: a tensor of any shape with a loss for each sample or token, not averaged
        (`reduction="none"`); a mean counts as one loss. `mask`: a tensor of the same shape, True
        for losses that count, or their weights.

        Return the `Update` of the step, or None if more pieces are to come. Call it equally often
        on all ranks: the step is a collective.

        Raises ValueError if the shapes of `mask` and `losses` differ.
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
        """Step with the pieces since the last step, for example at the end of an epoch.

        Return None if there are none. Call it on all ranks or on none.
        """
        if not self._pieces:
            return None
        loss, count = self._totals
        if self.every > 1:
            _mark_step(loss)  # the step is a program of its own, so that the piece's stays the same
        for parameter in self._zeros:
            if id(parameter) not in self._used:
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
        """Create gradients of 0: without them, the first piece would be a different program."""
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
                self._used.add(id(parameter))
            self._zeros[parameter] = parameter.grad
            parameter.register_post_accumulate_grad_hook(_noting(self._used))
        if not self._totals:
            self._totals = [as_scalar(0.0, loss), as_scalar(0.0, loss)]
        if new:
            _mark_step(loss)


def _noting(used: set[int]) -> Callable[[torch.Tensor], None]:
    return lambda parameter: used.add(id(parameter))


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
    """Step with gradients of sums; `count` and `others` are summed over ranks in place."""
    with torch.no_grad():
        gradients = _gradients(optimizer)
        # In the same collective as the gradients.
        sum_over_ranks([*gradients, count, *others])
        scale = reciprocal_or_zero(count)
        return _step(optimizer, gradients, scale, total_norm(gradients) * scale, max_norm)


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise ValueError("optimizer_step: no parameter has a gradient: call loss.backward() first")
    if any(map(is_dtensor, gradients)):
        raise TypeError(
            "optimizer_step: each rank has a part of the gradients (fully_shard, DTensor), reduced "
            "already: call optimizer.step(), and torch.nn.utils.clip_grad_norm_ before it"
        )
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


def as_scalar(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """Return a number as a new tensor of one element on the device of `like`, at least float32.

    It is made on the CPU and copied: a number that is part of the graph would make a new graph
    for each value.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.as_tensor(value).detach().to(like.device, dtype, copy=True)


def reciprocal_or_zero(count: torch.Tensor) -> torch.Tensor:
    """1 / count, or 0 if the count is 0."""
    reciprocal = 1 / count.clamp(min=torch.finfo(count.dtype).tiny)
    return torch.where(count > 0, reciprocal, torch.zeros_like(count))


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all elements together, in float32; in float64 for float64 gradients."""
    norms = [
        torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
