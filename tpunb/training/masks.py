"""Masked means and losses, computed on the device without reading or waiting for a value."""

from __future__ import annotations

import torch

from tpunb.training.collectives import sum_over_ranks
from tpunb.training.ranks import rank_and_world


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean of the values for which `mask` is True, over all values or along `dim`.

        masked_mean(words, mask, dim=1)  # (rows, words, features) -> (rows, features)

    `mask` has the shape of `values` or of its first dimensions, such as a mask of rows for values
    of tokens. A mask of numbers holds weights. The mean is 0 if no value counts. Masked values may
    be inf or NaN, and get the gradient 0. Sums are at least float32, even for bfloat16 values.

    It covers this rank only: for a loss over ranks with unequal masks use `masked_loss`, for a
    metric `MaskedMean`. Raises ValueError if the shape of `mask` does not fit.
    """
    total, weight = weighted_sums(values, mask, dim)
    return total / _not_zero(weight)


def masked_loss(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return this rank's loss for a step in which all samples of all ranks weigh the same.

        losses = F.cross_entropy(model(x), y, reduction="none")
        masked_loss(losses, mask).backward()
        xm.optimizer_step(optimizer)

    `losses`: a loss for each sample or token (`reduction="none"`); `mask` as in `masked_mean`.
    `xm.optimizer_step` and DistributedDataParallel average gradients over ranks, so each rank's
    loss is its sum divided by the mean of all ranks' weights: averaged over ranks, losses and
    gradients are those of all samples together, even if a rank has few samples or none. On one core
    it equals `masked_mean`.
    Call it on every rank: it sums the weights over all ranks.
    """
    total, weight = weighted_sums(losses, mask)
    world = rank_and_world()[1]
    if world > 1:
        weight = _over_ranks(weight) / world
    return total / _not_zero(weight)


class MaskedMean:
    """The mean of a metric over a loop and over all ranks, kept on the device.

        accuracy = MaskedMean()
        for (x, labels), mask in batches:
            accuracy.add(model(x).argmax(1) == labels, mask)
        print(accuracy.mean().item())

    Call both methods on every rank: `mean` is a collective.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add the values for which `mask` is True; bools count as 0 and 1. See `masked_mean`."""
        if mask is None:
            mask = torch.ones((), dtype=torch.bool, device=values.device)
        if self._sums is None:
            # Copied, not made on the device: so the first step's program is that of later steps.
            self._sums = torch.zeros(2).to(values.device)
        self._sums = self._sums + torch.stack(weighted_sums(values.detach(), mask)).float()

    def mean(self) -> torch.Tensor:
        """Return the mean of all values of all ranks: a tensor of one element, equal on all ranks.

        It is 0 if no value counts. Call it on every rank. Raises ValueError before the first
        `add`.
        """
        if self._sums is None:
            raise ValueError("MaskedMean: call add() first")
        sums = self._sums
        if rank_and_world()[1] > 1:
            sums = _over_ranks(sums)
        return sums[0] / _not_zero(sums[1])


def weighted_sums(
    values: torch.Tensor, mask: torch.Tensor, dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of values, and the sum of weights."""
    if mask.shape != values.shape[: mask.dim()]:
        raise ValueError(
            f"a mask of shape {list(mask.shape)} for values of shape {list(values.shape)}: it "
            "needs their shape, or that of their first dimensions"
        )
    if not values.is_floating_point() or values.dtype.itemsize < 4:
        values = values.float()
    if mask.dim() < values.dim():
        mask = mask.reshape(mask.shape + (1,) * (values.dim() - mask.dim())).expand_as(values)
    # A product is not enough: 0 * nan is nan, in the value and in the gradient. (torch.where would
    # also work, but costs 50 µs more per step, because it makes a tensor of the 0.)
    if mask.dtype == torch.bool:
        counted = values.masked_fill(~mask, 0)
    else:
        counted = values.masked_fill(mask == 0, 0) * mask
    return counted.sum(dim), mask.sum(dim, dtype=values.dtype)


def _not_zero(weight: torch.Tensor) -> torch.Tensor:
    return weight + (weight == 0)


def _over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.detach().clone()
    sum_over_ranks([total])
    return total
