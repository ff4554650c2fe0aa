"""`optimizer_step` and `Accumulation` against one backward pass of plain PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from tests.drivers.ranks import Ranks, rehearse
from tpunb.training import Accumulation, optimizer_step

STEPS, WORLD, PIECES, SIZE = 3, 2, 3, 4


class Net(nn.Module):
    """A model in float64 with an unused layer, as many pretrained models have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # weight_decay would shrink what is not used, if it had gradients of 0.
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data of steps × ranks × pieces × samples, with an uneven mask and NaN in masked values."""
    g = torch.Generator().manual_seed(1)
    shape = (STEPS, WORLD, PIECES, SIZE)
    x = torch.randn(*shape, 5, generator=g, dtype=torch.float64)
    y = torch.randint(3, shape, generator=g)
    mask = torch.rand(shape, generator=g) < torch.linspace(0, 1, PIECES)[:, None]
    mask[:, 0, 0, 0] = True
    assert len(mask[0].sum(-1).unique()) > 2
    assert not mask[0, 1, 0].any()
    return x, y, mask


def plain(max_norm: float, steps: int = STEPS) -> tuple[Any, list[float], list[float]]:
    """Weights, losses and norms of plain PyTorch, with one backward pass per step."""
    x, y, mask = data()
    model = Net()
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(steps):
        keep = mask[step]
        loss = F.cross_entropy(model(x[step][keep]), y[step][keep])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses, norms


def accumulated(max_norm: float, device: str = "cpu") -> tuple[Any, list[float], list[float]]:
    """The same with `Accumulation`: for the rank's own part, or for both parts in turn."""
    rank, world = 0, 1
    if device == "xla":
        rank, world = rehearse()
    x, y, mask = (each.to(device) for each in data())
    model = Net().to(device)
    updates, every = [], WORLD * PIECES // world
    accumulation = Accumulation(optimizer_of(model), every, max_norm=max_norm)
    for step in range(STEPS):
        for part in range(WORLD) if world == 1 else [rank]:
            for piece in range(PIECES):
                at = step, part, piece
                losses = F.cross_entropy(model(x[at]), y[at], reduction="none")
                losses = torch.where(mask[at], losses, torch.nan)
                update = accumulation.backward(losses, mask[at])
                assert (update is None) == (accumulation._pieces > 0)
        assert update is not None
        updates.append(update)
    assert accumulation.finish() is None
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return weights, [u.loss.item() for u in updates], [u.norm.item() for u in updates]


def same(found: Any, expected: Any) -> None:
    weights, losses, norms = found
    assert losses == pytest.approx(expected[1], rel=1e-12)
    assert norms == pytest.approx(expected[2], rel=1e-12)
    for name, value in expected[0].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_pieces_are_one_backward_pass(max_norm: float) -> None:
    expected = plain(max_norm)
    assert all(norm > 0.1 for norm in expected[2])  # one of the two clips
    same(accumulated(max_norm), expected)


def test_accumulation_finish_steps_with_the_rest() -> None:
    x, y, mask = data()
    model = Net()
    accumulation = Accumulation(optimizer_of(model), 100, max_norm=0.1)
    for at in range(WORLD):
        for piece in range(PIECES):
            losses = F.cross_entropy(model(x[0, at, piece]), y[0, at, piece], reduction="none")
            assert accumulation.backward(losses, mask[0, at, piece]) is None
    update = accumulation.finish()
    assert update is not None
    assert update.count.item() == mask[0].sum().item()
    same((model.state_dict(), [update.loss.item()], [update.norm.item()]), plain(0.1, steps=1))


def by_hand(device: str) -> tuple[Any, list[float]]:
    """Steps of `optimizer_step` with counts, and one without."""
    rank, world = rehearse()
    x, y, mask = (each[:, rank].to(device) for each in data())
    model = Net().to(device)
    optimizer = optimizer_of(model)
    norms = []
    for step in range(STEPS):
        keep = mask[step].double()
        outputs = model(x[step]).flatten(0, 1)
        losses = F.cross_entropy(outputs, y[step].flatten(), reduction="none")
        (losses * keep.flatten()).sum().backward()
        norms.append(optimizer_step(optimizer, count=keep.sum(), max_norm=0.1))
        optimizer.zero_grad()
    model.net[0].weight.grad = torch.full_like(model.net[0].weight, float(rank + 1))
    size = optimizer_step(torch.optim.SGD([model.net[0].weight], lr=0.0), max_norm=1e-3)
    clipped = torch.linalg.vector_norm(model.net[0].weight.grad)
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    assert clipped.item() == pytest.approx(1e-3, rel=1e-4)
    assert size.item() == pytest.approx((world + 1) / 2 * 40**0.5)
    return weights, [norm.item() for norm in norms]


def test_optimizer_step_counts_over_ranks(ranks: Ranks) -> None:
    weights, _, norms = plain(0.1)
    for found in ranks.values(by_hand, WORLD, "xla"):
        same((found[0], [], found[1]), (weights, [], norms))


def on_the_cpu() -> str:
    rehearse()
    model = Net()
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        optimizer_step(optimizer_of(model))
    return str(raised.value)


def test_a_model_that_was_not_moved_raises(ranks: Ranks) -> None:
    told = ranks.values(on_the_cpu, 2)
    assert told == [told[0]] * 2
    assert "the tensors are on cpu, where the 2 ranks" in told[0]
    assert "model.to(torch_xla.device())" in told[0]


def compiled_and_reduced() -> list[tuple[int, int, int]]:
    """Return the compilations, collectives and transfers from the device after each step."""
    rehearse()
    import torch_xla
    import torch_xla.debug.metrics as met

    device = torch_xla.device()
    model = Net().float().to(device)
    accumulation = Accumulation(optimizer_of(model), PIECES, max_norm=1.0)
    x, y, mask = data()
    found = []
    for step in range(2 * STEPS):
        for piece in range(PIECES):
            at = step % STEPS, 0, piece
            on = [each[at].to(device) for each in (x.float(), y, mask)]
            losses = F.cross_entropy(model(on[0]), on[1], reduction="none")
            update = accumulation.backward(losses, on[2])
        assert update is not None
        compiled = (met.metric_data("CompileTime") or [0])[0]
        read = (met.metric_data("TransferFromDeviceTime") or [0])[0]
        found.append((compiled, met.counter_value("xla::AllReduceInPlace") or 0, read))
    return found


def test_one_collective_a_step_and_no_program_after_the_second(ranks: Ranks) -> None:
    for found in ranks.values(compiled_and_reduced, 2):
        assert [reduced for _, reduced, _ in found] == [1, 2, 3, 4, 5, 6]
        assert len({compiled for compiled, _, _ in found[1:]}) == 1, found
    ((alone),) = ranks.values(compiled_and_reduced, 1)
    assert len({compiled for compiled, _, _ in alone[1:]}) == 1, alone
    assert {read for _, _, read in alone} == {0}  # nothing waits for the device


def test_a_mask_of_another_shape_raises() -> None:
    model = Net()
    losses = F.cross_entropy(model(torch.ones(4, 5).double()), torch.zeros(4).long())
    with pytest.raises(ValueError, match=r'shape \[4\] for losses of shape \[\].*reduction="none"'):
        Accumulation(optimizer_of(model), 2).backward(losses, torch.ones(4))


def test_bfloat16_gradients_have_a_float32_norm() -> None:
    weight = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 1.01)
    norm = optimizer_step(torch.optim.SGD([weight], lr=0.0))
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(weight.grad[0].item() * 100, rel=1e-5)


def test_accumulation_with_an_empty_mask_gives_zero_gradients() -> None:
    model = Net()
    accumulation = Accumulation(optimizer_of(model), 1)
    losses = F.cross_entropy(model(torch.ones(4, 5).double()), torch.zeros(4).long())
    update = accumulation.backward(losses[None], torch.zeros(1))
    assert update is not None
    assert (update.loss.item(), update.norm.item(), update.count.item()) == (0, 0, 0)
    assert not any(value.isnan().any() for value in model.state_dict().values())


@pytest.mark.parametrize("count", [1, 2])
def test_pieces_of_ranks_are_one_backward_pass(ranks: Ranks, count: int) -> None:
    expected = plain(0.1)
    for found in ranks.values(accumulated, count, 0.1, "xla"):
        same(found, expected)
