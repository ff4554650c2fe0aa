"""Masked means and losses, on the device: nothing here reads a value or waits for one."""

from __future__ import annotations

import torch

from tpunb.training.ranks import rank_and_world


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The mean of the values where `mask` is true: of all, or along a dimension.

    `masked_mean(words, mask, dim=1)`: for (rows, words, features) a mean per row. `mask` has the
    shape of `values`, or of its first dimensions (a mask of rows for values of tokens). Numbers
    in it are weights. Where nothing counts the mean is 0. Masked values may be inf or NaN, and
    get the gradient 0. Sums are float32 at least, for bfloat16 too.

    For this rank only: for a loss over ranks with unequal masks use `masked_loss`, for a metric
    `MaskedMean`.
    """
    total, weight = weighted_sums(values, mask, dim)
    return total / _not_zero(weight)


def masked_loss(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The loss of a step in which every sample of all ranks has the same weight.

    `losses`: one for each sample or token (`reduction='none'`); `mask` as in `masked_mean`.
    `xm.optimizer_step` averages gradients over ranks, so each rank's loss is its sum divided by
    the mean of all ranks' weights: averaged over ranks, losses and gradients are those of all
    samples together, even if a rank has few or none. On one core it is `masked_mean`. Every rank
    must call it: it sums the weights of all ranks.
    """
    total, weight = weighted_sums(losses, mask)
    world = rank_and_world()[1]
    if world > 1:
        weight = _over_ranks(weight) / world
    return total / _not_zero(weight)


class MaskedMean:
    """A mean over a loop and over all ranks, for metrics; kept on the device.

    `accuracy.add(guess == labels, mask)` in each step, `accuracy.mean()` after the loop, in
    every rank.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add the values where `mask` is true (bools are 0 and 1); see `masked_mean`."""
        if mask is None:
            mask = torch.ones((), dtype=torch.bool, device=values.device)
        if self._sums is None:
            # Moved there, not made there: so the first step is the same program as the others.
            self._sums = torch.zeros(2).to(values.device)
        self._sums = self._sums + torch.stack(weighted_sums(values.detach(), mask)).float()

    def mean(self) -> torch.Tensor:
        """The mean of all values on all ranks: the same tensor on each, 0 without any value."""
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
    # Not a product alone: 0 * nan is nan, in the value and in the gradient. (torch.where would
    # do as well, and costs a step 50 µs more: it makes a tensor of the 0.)
    if mask.dtype == torch.bool:
        counted = values.masked_fill(~mask, 0)
    else:
        counted = values.masked_fill(mask == 0, 0) * mask
    return counted.sum(dim), mask.sum(dim, dtype=values.dtype)


def _not_zero(weight: torch.Tensor) -> torch.Tensor:
    return weight + (weight == 0)


def _over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    import torch_xla.core.xla_model as xm

    total = xm.all_reduce(xm.REDUCE_SUM, tensor)
    assert isinstance(total, torch.Tensor)  # of a tensor, not of a list
    return total
