"""The helpers of `tpunb.training` on real rehearsal ranks: one warm process for all of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.drivers.lazy import met, torch_xla, xm
from tests.drivers.ranks import Ranks, rehearse
from tests.training.test_inference import Model, Numbers, check, data
from tpunb.training import MaskedMean, masked_loss, predict, shard

ROWS, FEATURES, CLASSES = 12, 5, 3


def asked() -> list[tuple[int, int, bool]]:
    """Who this is in the eyes of the helpers, before and after the XLA runtime is in use."""

    from tpunb.training.ranks import is_first, rank_and_world

    os.environ.update(RANK="2", WORLD_SIZE="4")  # no rehearsal: XLA knows of one rank only
    found = []
    for _ in range(2):
        found.append((*rank_and_world(), torch_xla._XLAC._xla_runtime_is_initialized()))
        assert not is_first()
        torch_xla.device()
    return found


def test_rank_and_world_do_not_start_the_xla_runtime(ranks: Ranks) -> None:
    assert ranks.values(asked, 1) == [[(2, 4, False), (0, 1, True)]]


def seen(sizes: list[int], batch_size: int) -> list[tuple[list[int], int]]:
    """How often all ranks together saw each index, and the steps of this rank."""
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    rehearse()
    device, found = torch_xla.device(), []
    for workers, size in enumerate(sizes):
        loader = DataLoader(torch.arange(size), batch_size, num_workers=workers)  # type: ignore[arg-type]
        steps, counts = 0, torch.zeros(size, dtype=torch.int64)
        for batch, mask in MpDeviceLoader(shard(loader), device):
            # What a collective of a training is for: ranks with unequal steps would not meet.
            assert int(xm.all_reduce("sum", mask.sum())) > 0
            counts.index_add_(0, batch.cpu(), mask.cpu().long())
            steps += 1
        assert steps == len(shard(loader))
        found.append((xm.all_reduce("sum", counts.to(device)).tolist(), steps))
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_shard_on_ranks_gives_each_sample_once_in_equal_steps(ranks: Ranks, world: int) -> None:
    sizes = [7, 100]
    for of_rank in ranks.values(seen, world, sizes, 4):
        for size, (counts, steps) in zip(sizes, of_rank, strict=True):
            assert counts == [1] * size
            assert steps == -(-size // (4 * world))


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    weight = torch.randn(CLASSES, FEATURES, generator=generator)
    return x, y, weight


def train(counts: list[int]) -> dict[str, Any]:
    """One step on ranks that have so many samples each; the rest of each batch is masked."""
    rank, _ = rehearse()
    device = torch_xla.device()
    x, y, weight = batch()
    first = sum(counts[:rank])
    rows = torch.arange(first, first + ROWS).clamp(max=ROWS - 1)
    mask = (torch.arange(ROWS) < counts[rank]).to(device)
    x, y = x[rows].to(device), y[rows].to(device)
    x[~mask] = float("nan")  # what fills a batch is of no account
    model = torch.nn.Linear(FEATURES, CLASSES, bias=False).to(device)
    with torch.no_grad():
        model.weight.copy_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metric = MaskedMean()
    reads = met.counter_value("xla::_local_scalar_dense") or 0
    compiled = []
    for _ in range(3):
        optimizer.zero_grad()
        guess = model(torch.where(mask[:, None], x, 0))
        losses = torch.nn.functional.cross_entropy(guess, y, reduction="none")
        loss = masked_loss(losses, mask)
        loss.backward()
        xm.optimizer_step(optimizer)
        metric.add(guess.argmax(1) == y, mask)
        torch_xla.sync()
        compiled.append(met.metric_data("CompileTime")[0])
    assert (met.counter_value("xla::_local_scalar_dense") or 0) == reads
    assert compiled[1] == compiled[2]
    assert model.weight.grad is not None
    return {
        "loss": xm.all_reduce("sum", loss.detach()).item() / len(counts),
        "gradient": model.weight.grad.cpu(),
        "accuracy": metric.mean().item(),
    }


@pytest.mark.parametrize("counts", [[12], [7, 5], [3, 0, 9]])
def test_masked_loss_on_ranks_weighs_every_sample_equally(ranks: Ranks, counts: list[int]) -> None:
    x, y, weight = batch()
    weight = weight.double().requires_grad_()
    guess = x.double() @ weight.T
    loss = torch.nn.functional.cross_entropy(guess, y)
    loss.backward()
    assert weight.grad is not None
    for found in ranks.values(train, len(counts), counts):
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(found["gradient"].double(), weight.grad, rtol=1e-4, atol=1e-6)
        accuracy = (guess.argmax(1) == y).double().mean().item()
        assert found["accuracy"] == pytest.approx(accuracy, rel=1e-6)


def on_ranks(sizes: list[int], batch_size: int) -> dict[str, Any]:
    """Predictions for data of several sizes, and how many programs each has compiled."""

    from tpunb.backends.xla.counters import compilations

    rehearse()
    model = Model().to(torch_xla.device())
    found, compiled = [], []
    for size in sizes:
        before = compilations()
        found.append(predict(model, data(size), batch_size))
        compiled.append(compilations() - before)
    stream = predict(nn.Identity(), Numbers(sizes[-1]), batch_size)
    half = predict(model, data(sizes[-1]), batch_size, bf16=True)

    return {
        "found": found,
        "compiled": compiled,
        "stream": stream,
        "half": half,
        "shapes": set(model.calls),
        "collectives": met.counter_value("xla::AllGather"),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_predict_on_ranks_shares_the_work_and_gathers_on_rank_0(ranks: Ranks, world: int) -> None:
    sizes = [70, 0, 1, 5, 6, 211]
    first, *others = ranks.values(on_ranks, world, sizes, 5)
    for size, found in zip(sizes, first["found"], strict=True):
        if size:
            check(found, size)
        else:
            assert found is None
    check(first["half"], sizes[-1], tolerance=0.03)
    assert not torch.equal(first["half"].logits, first["found"][-1].logits)
    assert torch.equal(first["stream"], torch.arange(sizes[-1]))
    for other in others:
        assert other["found"] == [None] * len(sizes)
        assert other["stream"] is other["half"] is None
    for each in [first, *others]:
        assert each["shapes"] == {(5, 4)}  # every batch is full, so …
        assert each["compiled"][0] >= 1
        assert not any(each["compiled"][1:])  # … one size compiles, and no other after it
        if world > 1:
            steps = sum(-(-size // (5 * world)) for size in [*sizes, sizes[-1]])
            assert each["collectives"] == 3 * steps + -(-sizes[-1] // (5 * world))
