"""A training resumed from a checkpoint is, bit for bit, equal to one that was not stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tests.drivers.ranks import Ranks, rehearse
from tpunb.errors import CheckpointError
from tpunb.training import Position, TrainingState

EPOCHS = 3


class Images(Dataset[Any]):
    """20 images, each randomly changed by three generators whenever it is read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, at: int) -> Any:
        self.reads.append(at)
        noise = torch.rand(6) + random.random() + float(np.random.rand())
        return torch.full((6,), float(at)) + noise, at % 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Images()[at] for at in range(20))


def train(kind: str, folder: str, stop: int | None) -> tuple[list[float], list[torch.Tensor]]:
    """Train to the end, or until a checkpoint is written: losses, then all tensors of all parts.

    On XLA with dropout and BatchNorm, and a scheduler.
    """
    rank, world = rehearse()
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(7)
    device = torch_xla.device()
    net = [nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.1)]
    model = nn.Sequential(*net).to(device)
    torch.manual_seed(rank)  # other orders
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    images = Images()
    if kind == "distributed":
        sampler = DistributedSampler(images, world, rank, seed=3)
        loader: Any = DataLoader(images, 4, sampler=sampler)
    elif kind == "device":  # it reads ahead, in a thread; its workers are processes
        loader = DataLoader(images, 4, shuffle=True, num_workers=1)
        loader = MpDeviceLoader(loader, device)
    elif kind == "stream":
        loader = DataLoader(Stream(), 4)
    else:
        loader = DataLoader(images, 4, shuffle=True)
    batches = Position(loader, replay=kind == "device")
    seen = {"steps": 0}
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = TrainingState(**parts, batches=batches, seen=seen, path=folder)
    step, losses = state.load(), []
    assert seen["steps"] == step
    for _ in range(batches.epoch, EPOCHS):
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            xm.optimizer_step(optimizer)
            optimizer.zero_grad()
            scheduler.step()
            seen["steps"] += 1
            losses.append(loss.item())
            state.save(step)
            if step == stop:
                return losses, []
            step += 1
    tensors = [*model.state_dict().values()]
    for one in optimizer.state_dict()["state"].values():
        tensors += one.values()
    return losses, [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize(
    ("kind", "count", "stop"),
    [
        ("shuffled", 1, 6),  # in the middle of an epoch
        ("shuffled", 2, 1),
        ("device", 2, 7),
        # At the end of an epoch: of 3 batches.
        ("distributed", 2, 2),
        ("stream", 1, 8),
    ],
)
def test_a_resumed_training_is_the_same(
    ranks: Ranks, kind: str, count: int, stop: int, tmp_path: Path
) -> None:
    whole = ranks.values(train, count, kind, str(tmp_path / "whole"), None)
    begun = ranks.values(train, count, kind, str(tmp_path / "parts"), stop)
    resumed = ranks.values(train, count, kind, str(tmp_path / "parts"), None)
    for rank in range(count):
        losses, tensors = whole[rank]
        assert begun[rank][0] == losses[: stop + 1]
        assert resumed[rank][0] == losses[stop + 1 :]
        assert len(losses) > stop + 2
        assert all(map(torch.equal, resumed[rank][1], tensors))
        assert len(tensors) == 9 + 3 * 6
    if count == 2:
        (means, weights), others = whole[0][1][2:6:3], whole[1][1][2:6:3]
        assert not torch.equal(means, others[0])  # each rank has its own data
        assert torch.equal(weights, others[1])


def through(batches: Position, epochs: int) -> list[list[int]]:
    """Return the remaining batches of each epoch."""
    return [torch.cat(list(batches)).tolist() for _ in range(batches.epoch, epochs)]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [False, True])
def test_resume_continues_the_order_of_batches(
    workers: int, given: bool, outside_run: Path
) -> None:
    def loader() -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        if given:
            options["generator"] = torch.Generator().manual_seed(5)
        return DataLoader(range(20), 3, shuffle=True, **options)  # type: ignore[arg-type]

    torch.manual_seed(1)
    expected = through(Position(loader()), EPOCHS)
    assert [sorted(epoch) for epoch in expected] == [list(range(20))] * EPOCHS
    assert expected[0] != expected[1]

    torch.manual_seed(1)
    batches = Position(loader())
    state = TrainingState(batches=batches)
    seen = 0
    for _ in range(batches.epoch, 2):
        for _batch in batches:
            seen += 1
            if seen == 7 + 4:
                state.save(seen)
                break
    torch.manual_seed(99)
    again = Position(loader())
    assert TrainingState(batches=again).load() == 12
    assert (again.epoch, again.batch) == (1, 4)
    assert through(again, EPOCHS) == [expected[1][12:], expected[2]]


def test_resume_does_not_read_skipped_batches(outside_run: Path) -> None:
    images = Images()
    batches = Position(DataLoader(images, 2, shuffle=True))
    iterator = iter(batches)
    for _ in range(6):
        next(iterator)
    state = batches.state_dict()
    batches = Position(DataLoader(images, 2, shuffle=True))
    batches.load_state_dict(state)
    images.reads.clear()
    assert len(list(batches)) == 4
    assert len(images.reads) == 8


def test_an_abandoned_epoch_starts_the_next() -> None:
    batches = Position([1, 2, 3])
    assert next(iter(batches)) == 1
    assert list(batches) == [1, 2, 3]
    assert batches.epoch == 2
    assert len(batches) == 3


def test_position_with_a_batch_sampler_or_none() -> None:
    for options in ({"batch_size": None}, {"batch_sampler": [[0, 1], [2, 3], [4, 5]]}):
        batches = Position(DataLoader(range(6), **options))  # type: ignore[arg-type]
        whole = [torch.as_tensor(batch).tolist() for batch in batches]
        iterator = iter(batches)
        next(iterator), next(iterator)
        again = Position(DataLoader(range(6), **options))  # type: ignore[arg-type]
        again.load_state_dict(batches.state_dict())
        assert [torch.as_tensor(batch).tolist() for batch in again] == whole[2:]


def counted(folder: str) -> int:
    rehearse()
    return TrainingState(model=nn.Linear(2, 2), path=folder).load()


def saved(folder: str) -> None:
    rehearse()
    TrainingState(model=nn.Linear(2, 2), path=folder).save(3)


def test_resume_with_another_number_of_ranks_raises(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(saved, 2, str(tmp_path)) == [None, None]
    assert ranks.values(counted, 2, str(tmp_path)) == [4, 4]
    (ended,) = ranks.run(counted, 1, str(tmp_path))
    assert "has a part from each of 2 ranks, and this run has 1" in ended.error


def test_training_state_checks_its_parts(outside_run: Path) -> None:
    with pytest.raises(TypeError, match=r"rate is a float, which has no load_state_dict"):
        TrainingState(rate=0.1)
    with pytest.raises(ValueError, match=r"own=\['other'\] are not"):
        TrainingState(model=nn.Linear(1, 1), own=["other"])
    assert TrainingState(model=nn.Linear(1, 1)).load() == 0
    with pytest.raises(CheckpointError):
        TrainingState(model=nn.Linear(1, 1)).load(step=3)
