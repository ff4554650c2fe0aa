"""One rank that measures collectives and bare gloo: a script for torchrun.

    torchrun --nproc-per-node=2 exchange.py ROUNDS NAMES

Rank 0 prints a line of JSON: for each name, a list of milliseconds for each round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

from tpunb.backends.xla.rehearsal.install_xla import install_rehearsal

LARGE = 25_000_000
"""Number of float32 values: 100 MB."""
MANY, SMALL = 100, 2_500
"""100 tensors of 10 kB."""
WIDTH, LAYERS, BATCH = 2048, 6, 16
"""Sizes of the model with 25 million parameters."""
CALLS = 5
"""Number of times that each action is measured in a round."""


@dataclass
class Clock:
    """Times actions of all ranks together, or of rank 0 alone."""

    rank: int
    rounds: list[dict[str, list[float]]] = field(default_factory=list)

    def time(self, name: str, action: Callable[[], object], calls: int = CALLS) -> None:
        """Time `calls` calls, after one that compiles and connects."""
        times = self.rounds[-1].setdefault(name, [])
        for number in range(calls + 1):
            dist.barrier()
            began = time.perf_counter()
            action()
            if number:
                times.append(1000 * (time.perf_counter() - began))

    def time_alone(self, name: str, action: Callable[[], object]) -> None:
        """Time the action in rank 0, while the others wait without using their core."""
        if self.rank == 0:
            with _without_barrier():
                self.time(name, action)
        dist.barrier()


@contextmanager
def _without_barrier() -> Iterator[None]:
    barrier, dist.barrier = dist.barrier, lambda: None
    try:
        yield
    finally:
        dist.barrier = barrier


def reductions(clock: Clock) -> None:
    """All-reduce one large tensor, many small ones together, and many one by one."""
    device = torch_xla.device()
    large, plain = torch.ones(LARGE, device=device), torch.ones(LARGE)
    many = [torch.ones(SMALL, device=device) for _ in range(MANY)]
    flat, parts = torch.ones(MANY * SMALL), [torch.ones(SMALL) for _ in range(MANY)]
    torch_xla.sync()
    clock.time("large", lambda: xm.all_reduce("sum", [large]))
    clock.time("large bare", lambda: dist.all_reduce(plain))
    for _ in range(3):
        clock.time("list", lambda: xm.all_reduce("sum", many))
        clock.time("list bare", lambda: dist.all_reduce(flat))
    clock.time("calls", lambda: [xm.all_reduce("sum", [tensor]) for tensor in many])
    clock.time("calls bare", lambda: [dist.all_reduce(part) for part in parts])


class Step:
    """Training steps of one model, on this rank's own batch."""

    def __init__(
        self,
        model: nn.Module,
        batch: torch.Tensor,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ) -> None:
        self._model = model.to(torch_xla.device())
        self._batch = batch.to(torch_xla.device())
        self._optimizer = optimizer(self._model)

    def __call__(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        update(self._optimizer)
        torch_xla.sync()
        xm.wait_device_ops()  # sync(wait=True) only waits until XLA has started


def _cut(optimizer: torch.optim.Optimizer) -> None:
    """Run the step as two programs, as a collective between them would."""
    torch_xla._XLAC._xla_sync_live_tensors("", [], True)  # type: ignore[attr-defined]
    xm.wait_device_ops()
    optimizer.step()


def steps(clock: Clock) -> None:
    """Time a step of 25 million parameters: one rank, one rank in two programs, all ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    step = Step(
        nn.Sequential(*layers),
        torch.randn(BATCH, WIDTH),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
    )
    clock.time_alone("step alone", lambda: step(lambda optimizer: optimizer.step()))
    clock.time_alone("step cut", lambda: step(_cut))
    clock.time("step together", lambda: step(xm.optimizer_step))
    gradients = torch.ones(LAYERS * (WIDTH + 1) * WIDTH)
    clock.time("step bare", lambda: dist.all_reduce(gradients))


class Mnist(nn.Module):
    """The network of torch_xla's MNIST tests."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 10, 5), nn.BatchNorm2d(10), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, 20, 5), nn.BatchNorm2d(20), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images)
        return logits


def zero1(clock: Clock) -> None:
    """Time a step of MNIST with ZeRO-1, and with plain data parallelism."""
    images = torch.randn(128, 1, 28, 28)

    def sharded(model: nn.Module) -> torch.optim.Optimizer:
        kind = torch.optim.SGD
        return ZeroRedundancyOptimizer(
            model.parameters(), kind, lr=0.01, momentum=0.5, pin_layout=False
        )

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    with_zero1, without = Step(Mnist(), images, sharded), Step(Mnist(), images, plain)
    for _ in range(2):
        clock.time("zero1", lambda: with_zero1(lambda optimizer: optimizer.step()))
        clock.time("zero1 plain", lambda: without(xm.optimizer_step))


PARTS = {"reductions": reductions, "steps": steps, "zero1": zero1}


def main(rounds: int, names: list[str]) -> None:
    """Measure the parts with these names alternately, `rounds` times."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    install_rehearsal(rank, world)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    clock = Clock(rank)
    for _ in range(rounds):
        clock.rounds.append({})
        for name in names:
            PARTS[name](clock)
    if rank == 0:
        print(json.dumps(clock.rounds), flush=True)
    xm.rendezvous("end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
