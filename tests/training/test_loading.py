"""`check_loader` on loaders whose cost is known: they sleep."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.worker.ranks import rehearse, warm
from tpunb.training import LoaderCheck, Loading, check_loader

pytestmark = pytest.mark.long  # it measures


class Slow(Dataset[Any]):
    """Each sample takes a while; a batch of two takes two whiles."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor(at)


def test_a_step_that_waits_is_told_how_many_workers_help() -> None:
    steps: list[int] = []

    def step(batch: torch.Tensor) -> None:
        steps.append(len(batch))
        time.sleep(0.02)

    found = check_loader(DataLoader(Slow(0.05), 2), step, batches=4)
    # Sleeping is never shorter than asked for, so these hold on a machine that is busy, too.
    assert found.step >= 0.02
    assert found.loop >= 0.02 + 2 * 0.05
    assert steps == [2] * 4 * (4 + 3)
    assert [one.workers for one in found.tried][:3] == [0, 1, 2][: len(found.tried)]
    assert found.tried[0].seconds >= 2 * 0.05
    assert found.helps is not None
    assert found.helps in [
        Loading(o.workers, p, o.seconds) for o in found.tried for p in (2, 4, None)
    ]


def test_a_stream_and_a_list_are_measured_as_they_are() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(6))

    found = check_loader(DataLoader(Stream(), 2), lambda batch: time.sleep(0.01), batches=3)
    assert found.tried[0].workers == 0
    found = check_loader([torch.ones(2)] * 3, lambda batch: time.sleep(0.01), batches=3)
    assert (found.tried, found.helps) == ((), None)


def made(step: float, loop: float, *seconds: float, best: int = 0) -> LoaderCheck:
    tried = tuple(Loading(workers, None, each) for workers, each in enumerate(seconds))
    helps = Loading(best, 2, seconds[best]) if seconds else None
    return LoaderCheck(step, loop, tried, helps, 0.011 if seconds else None)


@pytest.mark.parametrize(
    ("check", "says", "not_"),
    [
        (made(0.01, 0.03, 0.02, 0.008, best=1), "num_workers=1, prefetch_factor=2", "FileCache"),
        (made(0.01, 0.03, 0.02, 0.015, best=1), "num_workers=1, prefetch_factor=2", "fast enough"),
        (
            made(0.01, 0.03, 0.02, 0.015, best=1),
            "It still waits: the processors cannot",
            "no faster",
        ),
        (
            made(0.01, 0.0112, 0.02, 0.015, best=1),
            "no faster: the processors cannot",
            "num_workers",
        ),
        (made(0.01, 0.0101, 0.001), "The loader is fast enough", "num_workers"),
        (made(0.01, 0.03), "It is not a DataLoader", "num_workers"),
    ],
)
def test_it_says_what_helps(check: LoaderCheck, says: str, not_: str) -> None:
    assert says in repr(check)
    assert not_ not in repr(check)
    assert f"waits for data {check.waits:.0%}" in repr(check)
    assert check.waits == pytest.approx(1 - check.step / check.loop)


def checked_in_a_rank() -> tuple[int, str]:
    rehearse()
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    device = torch_xla.device()
    model = torch.nn.Linear(1, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0

    def step(batch: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        assert batch.device.type == "xla"
        model(batch[:, None].float()).sum().backward()
        xm.optimizer_step(optimizer)
        optimizer.zero_grad()

    found = check_loader(MpDeviceLoader(DataLoader(Slow(0.01), 2), device), step, batches=4)
    assert found.loop >= 0.02
    return steps, repr(found)


@pytest.mark.slow
def test_ranks_make_equally_many_steps(tmp_path: Path) -> None:
    with warm(tmp_path) as ranks:
        (steps, told), (others, _) = ranks.values(checked_in_a_rank, 2)
    assert steps == others == 4 * (4 + 3)
    assert "0 workers: a batch every" in told


def test_reading_between_two_steps_counts_though_it_is_shorter_than_a_step() -> None:
    found = check_loader(DataLoader(Slow(0.02), 2), lambda batch: time.sleep(0.3), batches=3)
    assert found.tried[0].seconds < found.step  # not by little
    assert found.helps is not None
    assert found.helps.workers > 0
