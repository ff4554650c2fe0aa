"""A rank that measures `predict`: a script for torchrun.

    torchrun --nproc-per-node=4 inferring.py ROUNDS SAMPLES

Rank 0 prints a line of JSON: for each name, a list of seconds for each round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tpunb.backends.xla.rehearsal.install_xla import install_rehearsal
from tpunb.training import predict

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
    """Time `predict` on all ranks, and a loop on rank 0 alone, as notebooks write it."""
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


def main(rounds: int, samples: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        install_rehearsal(rank, world)
    found = predicting(rounds, samples)
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
