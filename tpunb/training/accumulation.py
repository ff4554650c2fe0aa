"""`Accumulation`: big batches in small pieces, with one collective and one step for each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from tpunb.training.gradients import as_scalar, mean_step, one_by
from tpunb.training.masks import weighted_sums


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
    """Steps of an optimizer that take several backward passes each.

        accumulation = Accumulation(optimizer, every=4, max_norm=1.0)
        for x, y, mask in batches:
            losses = F.cross_entropy(model(x), y, reduction="none")
            update = accumulation.backward(losses, mask)
            if update:
                scheduler.step()
                tpunb.log(step, loss=update.loss, norm=update.norm)
        accumulation.finish()

    Each step is what one backward pass over all of it would be: the mean over every loss that
    counts, in all pieces and on all ranks, however unevenly they are spread. It resets the
    gradients, and on XLA marks the steps (`torch_xla.sync()`), so that the program of a piece
    is the same for all pieces and is compiled once.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, every: int, *, max_norm: float | None = None
    ) -> None:
        """`every`: pieces in a step, on each rank. `max_norm`: see `optimizer_step`."""
        if every < 1:
            raise ValueError(f"Accumulation: every={every}: at least one piece makes a step")
        self.optimizer = optimizer
        self.every = every
        self.max_norm = max_norm
        self._pieces = 0
        self._totals: list[torch.Tensor] = []
        """Sum and count of the losses of this rank, since the last step."""
        self._zeros: dict[torch.Tensor, torch.Tensor] = {}
        self._used: set[torch.Tensor] = set()

    def backward(self, losses: torch.Tensor, mask: torch.Tensor | None = None) -> Update | None:
        """The backward pass of one piece; every so many pieces also the step.

        `losses`: one for each sample or token, not yet averaged (`reduction="none"`). `mask`, of
        the same shape: what counts (bool, or weights that multiply). A single mean instead of
        losses counts as one.

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
        """The step of what has been accumulated: after the last piece of an epoch, say.

        None if there is nothing. On all ranks or on none.
        """
        if not self._pieces:
            return None
        loss, count = self._totals
        if self.every > 1:
            _mark_step(loss)  # the step in a program of its own: the piece's stays the same
        for parameter in self._zeros:
            if parameter not in self._used:
                parameter.grad = None  # as it was never used, an optimizer passes it over
        norm = mean_step(self.optimizer, count, self.max_norm, loss)
        update = Update(loss * one_by(count), norm, count.clone())
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
        """Gradients of 0 from the start: without any, the first piece is another program."""
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
