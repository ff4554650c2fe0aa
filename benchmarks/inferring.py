"""A rank that measures `predict`, and steps with `shard`: a script for torchrun.

    torchrun --nproc-per-node=4 inferring.py predict ROUNDS SAMPLES
    torchrun --nproc-per-node=1 inferring.py steps ROUNDS SAMPLES

Rank 0 prints a line of JSON: for each name, a list of seconds for each round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tpunb.training import masked_loss, predict, shard
from tpunb.worker.rehearsal.install import install

WIDTH, CLASSES = 1024, 10
BATCH = 32

Times = dict[str, list[list[float]]]


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, CLASSES),
    ).to(torch_xla.device())


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def predicting(rounds: int, samples: int) -> Times:
    """All ranks with `predict`, and rank 0 alone in a loop as notebooks have it."""
    model = make_model(WIDTH)
    data = TensorDataset(torch.randn(samples, 64))

    def alone() -> None:
        parts = []
        with torch.no_grad():
            for (x,) in DataLoader(data, BATCH):
                parts.append(model(x.to("xla")).cpu())
        assert len(torch.cat(parts)) == samples

    def together() -> None:
        predict(model, data, BATCH)

    first = xm.is_master_ordinal()
    found: Times = {"alone": [], "together": []}
    for number in range(rounds + 1):  # the first compiles
        times = {"together": timed(together)}
        if first:
            times["alone"] = timed(alone)
        xm.rendezvous("a round")
        if number:
            for name, seconds in times.items():
                found[name].append([seconds])
    return found


def stepping(rounds: int, samples: int) -> Times:
    """Processor seconds of a step: in plain PyTorch, with `shard`, and with a mask as well."""
    data = TensorDataset(torch.randn(samples, 64), torch.randint(CLASSES, (samples,)))
    model = make_model(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    plain: DataLoader[list[torch.Tensor]] = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    dropping, padding = shard(plain, rest="drop"), shard(plain)

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync(wait=True)

    def losses(batch: Iterable[torch.Tensor], reduction: str) -> torch.Tensor:
        x, y = (part.to("xla") for part in batch)
        return nn.functional.cross_entropy(model(x), y, reduction=reduction)

    def bare() -> None:
        for batch in plain:
            step(losses(batch, "mean"))

    def bare_masked() -> None:
        mask = torch.ones(BATCH, dtype=torch.bool)
        for batch in plain:
            counts = mask.clone().to("xla")
            step((losses(batch, "none") * counts).sum() / counts.sum())

    def dropped() -> None:
        for batch in dropping:
            step(losses(batch, "mean"))

    def masked() -> None:
        for batch, mask in padding:
            step(masked_loss(losses(batch, "none"), mask.to("xla")))

    ways = {
        "bare": (bare, plain),
        "dropped": (dropped, dropping),
        "bare masked": (bare_masked, plain),
        "masked": (masked, padding),
    }
    found: Times = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds + 1):  # the first compiles
        for loader in (sampler, dropping, padding):
            loader.set_epoch(number)
        for name in order:
            work, loader = ways[name]
            began = time.process_time()  # what else the machine does is not in it
            work()
            seconds = time.process_time() - began
            if number:
                found[name].append([seconds / len(loader)])
        order.reverse()  # so that what drifts meanwhile hits all alike
    return found


def main(what: str, rounds: int, samples: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        install(rank, world, rank, world)
    found = {"predict": predicting, "steps": stepping}[what](rounds, samples)
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
