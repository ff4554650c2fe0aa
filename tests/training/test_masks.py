"""Masked means and losses against plain PyTorch in float64, also over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpunb.training import MaskedMean, masked_loss, masked_mean


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_masked_mean_equals_float64(
    shape: list[int], masked: int, dtype: torch.dtype, weighted: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(dtype)
    dims = shape[:masked]
    mask = torch.rand(dims, generator=generator) < 0.6
    weights = mask * (torch.randint(1, 4, dims, generator=generator) if weighted else 1)
    found = masked_mean(values, weights if weighted else mask)
    whole = weights.double().reshape(dims + [1] * (len(shape) - len(dims))).expand(shape)
    total = whole.sum()
    expected = (values.double() * whole).sum() / total if total else torch.zeros(())
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_along_a_dimension_it_is_the_mean_of_each(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 5, 3, generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.5
    mask[2] = False
    weights = mask.double()[..., None].expand_as(values)
    expected = (values.double() * weights).sum(dim) / weights.sum(dim).clamp(min=1)
    found = masked_mean(values, mask, dim)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_masked_values_do_not_affect_value_or_gradient(bad: float) -> None:
    values = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    mean = masked_mean(values, torch.tensor([True, False, True]))
    mean.backward()
    assert mean.item() == 2.0
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


def test_empty_mask_gives_zero() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    mean = masked_loss(values, torch.zeros(2, dtype=torch.bool))
    mean.backward()
    assert mean.item() == 0.0
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 0.0]
    metric = MaskedMean()
    metric.add(torch.ones(3), torch.zeros(3, dtype=torch.bool))
    assert metric.mean().item() == 0.0


def test_a_mean_over_many_bfloat16_batches_does_not_stop_growing() -> None:
    metric = MaskedMean()
    values = torch.ones(100, dtype=torch.bfloat16)
    for _ in range(1000):
        metric.add(values)
        metric.add(values * 3, torch.arange(100) < 50)
    assert metric.mean().item() == pytest.approx(250 / 150, rel=1e-6)


def test_shapes_that_do_not_match_raise() -> None:
    with pytest.raises(ValueError, match=r"mask of shape \[3\] for values of shape \[2, 3\]"):
        masked_mean(torch.zeros(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"call add\(\) first"):
        MaskedMean().mean()
