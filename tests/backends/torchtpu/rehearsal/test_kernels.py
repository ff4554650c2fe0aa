"""Training gives the numbers of the CPU; the device's own kernels do what torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def models() -> dict[str, Callable[[], Any]]:
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.cells, self.head = kind(20, 16, batch_first=True), nn.Linear(16, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.cells(x.unflatten(1, (2, 10)).repeat(1, 1, 2))[0][:, -1])

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(20, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.body(x.unflatten(1, (5, 4))).flatten(1))

    image = nn.Unflatten(1, (1, 4, 5))
    return {
        "mlp": lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)),
        "conv": lambda: nn.Sequential(
            image, nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        ),
        "norms": lambda: nn.Sequential(
            nn.Linear(20, 16), nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.Linear(16, 3)
        ),
        "lstm": lambda: Recurrent(nn.LSTM),
        "gru": lambda: Recurrent(nn.GRU),
        "attention": Attention,
    }  # fmt: skip


def trained(device: str, make: Callable[[], Any], optimizer: Callable[[Any], Any]) -> list[float]:
    import torch

    torch.manual_seed(0)
    model = make().to(device)
    stepper = optimizer(model.parameters())
    x, y = torch.randn(32, 20).to(device), (torch.arange(32) % 3).to(device)
    losses = []
    for _ in range(4):
        stepper.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["mlp", "conv", "norms", "lstm", "gru", "attention"])
def test_models_train_as_on_the_cpu(name: str) -> None:
    import torch

    make = models()[name]
    cpu, tpu = (trained(d, make, lambda p: torch.optim.SGD(p, lr=0.1)) for d in ("cpu", "tpu"))
    assert tpu == pytest.approx(cpu, rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_optimizers_step_as_on_the_cpu(name: str, options: dict[str, bool]) -> None:
    import torch

    def make(parameters: Any) -> Any:
        return getattr(torch.optim, name)(parameters, lr=0.01, **options)

    cpu, tpu = (trained(d, models()["mlp"], make) for d in ("cpu", "tpu"))
    assert tpu == pytest.approx(cpu, rel=1e-4)


def test_foreach_operations_count_versions() -> None:
    import torch

    lists = [torch.ones(2, device=d) for d in ("cpu", "tpu")]
    for value in lists:
        torch._foreach_add_([value], 1)
        torch._foreach_mul_([value], [2.0])
    assert lists[0]._version == lists[1]._version == 2


@pytest.mark.parametrize("shape", [(0,), (3,), (7,), (1,)])
def test_results_are_written_and_resized(shape: tuple[int, ...]) -> None:
    import warnings

    import torch

    x, out = torch.ones(3, device="tpu"), torch.zeros(shape, device="tpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.add(x, x, out=out) is out
    assert out.tolist() == [2, 2, 2]
    assert bool(caught) == (shape in ((7,), (1,)))
    every_other = torch.zeros(6, device="tpu")
    torch.add(x, x, out=every_other[::2])
    assert every_other.tolist() == [2, 0] * 3


def test_conjugate_and_negative_bits() -> None:
    import torch

    z = torch.tensor([1 + 2j, 3 - 1j], device="tpu")
    w = z.conj()
    assert w.is_conj()
    assert w.cpu().tolist() == [1 - 2j, 3 + 1j]
    assert w.imag.is_neg()
    assert w.imag.cpu().tolist() == [-2, 1]
    assert (w @ z).item() == 15
    w.add_(1)
    assert z.cpu().tolist() == [2 + 2j, 4 - 1j]
    assert torch.view_as_real(z)[0].tolist() == [2, 2]


def test_types_of_numbers() -> None:
    import torch

    names = "float64 float16 bfloat16 bool uint8 int8 uint16 int64 complex64 float8_e4m3fn"
    for name in names.split():
        dtype = getattr(torch, name)
        values = torch.ones(2).to(dtype)
        there = values.to("tpu")
        assert there.dtype is dtype
        assert (there.cpu() == values).all()


def test_indices_may_be_on_the_cpu() -> None:
    import torch

    x = torch.arange(6.0, device="tpu").view(2, 3)
    assert x[:, torch.tensor([2, 0])].tolist() == [[2, 0], [5, 3]]
    x[torch.tensor([0])] = 7
    assert x[0].tolist() == [7, 7, 7]
    assert torch.take_along_dim(x, x.argsort(1), 1).shape == (2, 3)


def test_memory_can_grow() -> None:
    import torch

    x = torch.ones(3, device="tpu").resize_(5)
    assert x[:3].tolist() == [1, 1, 1]
    assert torch.empty(0, device="tpu").resize_as_(x).shape == (5,)


def test_attention_uses_the_cpus_kernel() -> None:
    import torch
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention as attend

    q = torch.randn(2, 2, 8, 4)
    results = []
    for device in ("cpu", "tpu"):
        x = q.detach().clone().to(device).requires_grad_()
        result = attend(x, x, x, is_causal=True)
        result.square().sum().backward()
        assert x.grad is not None
        assert result.grad_fn is not None
        results.append((result.grad_fn.name(), result.tolist(), x.grad.tolist()))
    assert results[0] == results[1]
    x = q.to("tpu").detach()
    assert torch.vmap(lambda t: attend(t, t, t))(x).shape == q.shape
    assert torch.func.grad(lambda t: attend(t, t, t).sum())(x).shape == q.shape
    with attention.sdpa_kernel([attention.SDPBackend.OVERRIDEABLE]):
        assert attend(x, x, x).shape == q.shape


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch 2.15 will remove it
def test_other_layouts_are_refused() -> None:
    import torch
    from torch import nn

    x = torch.ones(3, device="tpu")
    loss = nn.Embedding(5, 3, sparse=True).to("tpu")(torch.tensor([1], device="tpu")).sum()
    for make in (
        loss.backward,
        x.to_sparse,
        lambda: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8),
    ):
        # Not unfinished work: torch's own type for what a layout lacks, which libraries catch.
        with pytest.raises(NotImplementedError, match="cannot be on a rehearsed TPU"):
            make()


def test_synchronized_batch_norm_is_missing_as_in_torch_tpu() -> None:
    import torch

    # Not unfinished work: torch's own type for an operation that a device lacks.
    with pytest.raises(NotImplementedError, match=r"TorchTPU 0\.2\.0 has no SyncBatchNorm"):
        torch.batch_norm_stats(torch.ones(2, 3, device="tpu"), 1e-5)


def test_all_metadata_operations_run_on_the_tensors_themselves() -> None:
    import torch

    from tpunb.backends.torchtpu.rehearsal.kernels import METADATA_ONLY, find_op

    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    views = set()
    for name in (n.removeprefix("aten::") for n in names if n.startswith("aten::")):
        if any(r.alias_info and not r.alias_info.is_write for r in find_op(name)._schema.returns):
            views.add(name)
    assert views - {"_nested_view_from_buffer"} == {n for n in METADATA_ONLY if "set_" not in n}
