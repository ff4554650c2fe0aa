"""bfloat16 against plain PyTorch in float64, and the updates that it loses."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from tests.drivers.ranks import Ranks, rehearse
from tpunb.training import Accumulation, MaskedMean, bf16, optimizer_step, watch_sums
from tpunb.training.precision import CHECKED_STEPS


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    return x, x[:, :5].argmax(1)


def trained(device: str, short: bool) -> dict[str, Any]:
    """Return the losses of 30 steps of 2 pieces, in float64 or under bf16()."""
    x, y = (each.to(device) for each in data())
    model = net().to(device)
    if not short:
        x, model = x.double(), model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accumulation = Accumulation(optimizer, 2, max_norm=1.0)
    mean, losses, norms = MaskedMean(), [], []
    for _ in range(30):
        for at in (slice(0, 20), slice(20, 64)):
            if short:
                with bf16():
                    out = model(x[at])
                    each = F.cross_entropy(out, y[at], reduction="none")
                assert (out.dtype, each.dtype) == (torch.bfloat16, torch.float32)
            else:
                each = F.cross_entropy(model(x[at]), y[at], reduction="none")
            update = accumulation.backward(each)
        assert update is not None
        losses.append(update.loss)
        norms.append(update.norm)
        mean.add(update.loss)
    kinds = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}  # type: ignore[union-attr]
    return {
        "losses": torch.stack(losses).tolist(),
        "norms": torch.stack(norms).tolist(),
        "mean": mean.mean().item(),
        "kinds": kinds,
    }


def trained_in_a_rank() -> dict[str, Any]:
    rehearse()
    return trained("xla", short=True)


def trained_beside_the_device() -> dict[str, Any]:
    rehearse()
    import torch_xla

    torch_xla.device()
    return trained("cpu", short=True)


def check(found: dict[str, Any]) -> None:
    exact = trained("cpu", short=False)
    assert found["kinds"] == {torch.float32}
    assert found["losses"] == pytest.approx(exact["losses"], rel=0.03)
    assert found["losses"] != pytest.approx(exact["losses"], rel=1e-6)  # it was in use
    assert found["norms"] == pytest.approx(exact["norms"], rel=0.05)
    assert found["mean"] == pytest.approx(sum(found["losses"]) / 30, rel=1e-5)
    assert exact["losses"][-1] < exact["losses"][0] / 2


def attend() -> dict[str, Any]:
    """Attention whose queries and keys are float32, as transformers' Llama has it."""
    rehearse()
    import torch_xla

    device = torch_xla.device()
    shape = (2, 3, 5, 8)
    query, key = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    value, mask = torch.randn(shape, device=device).bfloat16(), torch.zeros(5, 5, device=device)
    found = {}
    with bf16():
        for name, options in (("mask", {"attn_mask": mask}), ("causal", {"is_causal": True})):
            out = F.scaled_dot_product_attention(query, key, value, scale=0.3, **options)  # type: ignore[arg-type]
            out.float().sum().backward()
            found[name] = out.dtype
    assert query.grad is not None
    outside = F.scaled_dot_product_attention(query, key, key, attn_mask=mask, scale=0.3)
    exact = F.scaled_dot_product_attention(
        *(each.detach().cpu() for each in (query, key, key, mask)), scale=0.3
    )
    close = torch.allclose(outside.detach().cpu(), exact, atol=1e-5)
    return {**found, "grad": query.grad.dtype, "outside": outside.dtype, "close": close}


def test_attention_is_cast_as_on_other_devices(ranks: Ranks) -> None:
    (found,) = ranks.values(attend, 1)
    short, whole = torch.bfloat16, torch.float32
    assert found == {
        "mask": short, "causal": short, "grad": whole, "outside": whole, "close": True
    }  # fmt: skip


def test_downcast_variables_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with pytest.warns(UserWarning, match=r"XLA_USE_BF16 is set: .* weights and sums too"):
        bf16()
    monkeypatch.setenv("XLA_USE_BF16", "0")
    bf16()


def test_bf16_is_reusable_a_decorator_and_can_be_disabled() -> None:
    x, short = torch.ones(2, 2), bf16()
    for _ in range(2):
        with short:
            assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.float32
    product = bf16()(lambda: x @ x)
    assert [product().dtype, product().dtype] == [torch.bfloat16, torch.bfloat16]
    with bf16(False):
        assert (x @ x).dtype == torch.float32


def steps(model: nn.Module, lr: float, count: int = CHECKED_STEPS[0]) -> list[str]:
    """Return the warnings of some steps."""
    device = next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(count):
            model(data()[0].to(device, dtype)).float().square().mean().backward()
            optimizer_step(optimizer)
            optimizer.zero_grad()
            if device.type == "xla":
                import torch_xla

                torch_xla.sync()
    return [str(one.message) for one in told if "weights" in str(one.message)]


def test_weights_that_stop_moving_warn() -> None:
    (told,) = steps(net().bfloat16(), lr=1e-6)
    assert told.startswith(f"step {CHECKED_STEPS[0]} moved only ")
    assert "of the bfloat16 weights that have a gradient" in told


def test_moving_weights_do_not_warn() -> None:
    assert steps(net().bfloat16(), lr=3e-3) == []
    assert steps(net(), lr=1e-6) == []
    assert steps(net().bfloat16(), lr=1e-6, count=CHECKED_STEPS[0] - 1) == []


def told_in_a_rank(lr: float) -> list[str]:
    rehearse()
    import torch_xla

    return steps(net().bfloat16().to(torch_xla.device()), lr)


def test_an_optimizer_is_watched_once_and_can_be_freed() -> None:
    from tpunb.training.precision import _watched

    gc.collect()
    before = len(_watched)  # others that somebody in this process still has
    optimizer = torch.optim.SGD(net().bfloat16().parameters(), lr=0.1)
    watch_sums(optimizer)
    watch_sums(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert len(_watched) == before + 1
    del optimizer
    gc.collect()
    assert len(_watched) == before


def test_bf16_training_in_ranks_matches_float64(ranks: Ranks) -> None:
    for found in ranks.values(trained_in_a_rank, 2):
        check(found)
    (found,) = ranks.values(trained_beside_the_device, 1)
    check(found)


def test_ranks_warn_too(ranks: Ranks) -> None:
    assert [len(told) for told in ranks.values(told_in_a_rank, 2, 1e-6)] == [1, 1]
    assert ranks.values(told_in_a_rank, 1, 3e-3) == [[]]
