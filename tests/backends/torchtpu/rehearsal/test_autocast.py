"""torch.autocast("tpu") casts as CUDA's does, to bfloat16 unless it is told otherwise."""

from __future__ import annotations

import pytest


def test_types_of_results() -> None:
    import torch
    from torch.nn import functional

    x = torch.ones(2, 2, device="tpu")
    low = x.bfloat16()
    with torch.autocast("tpu"):
        assert torch.get_autocast_dtype("tpu") is torch.bfloat16
        assert (x @ x).dtype is functional.linear(x, x).dtype is torch.bfloat16
        assert low.exp().dtype is low.softmax(0).dtype is low.sum().dtype is torch.float32
        assert torch.dot(low[0], x[0]).dtype is torch.float32
        assert (x.double() @ x.double()).dtype is torch.float64
        with torch.autocast("tpu", enabled=False):
            assert (x @ x).dtype is torch.float32
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            functional.binary_cross_entropy(x, x)
    with torch.autocast("tpu", dtype=torch.float16):
        assert (x @ x).dtype is torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.float32


def test_gradients_have_the_types_of_their_parameters() -> None:
    import torch

    model = torch.nn.Linear(4, 2).to("tpu")
    with torch.autocast("tpu"):
        loss = model(torch.ones(3, 4, device="tpu")).square().sum()
    loss.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
