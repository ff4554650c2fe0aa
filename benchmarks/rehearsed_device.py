"""Time of a training step on the rehearsed device of TorchTPU, compared with the plain CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.table import Samples, met, table

GOAL = 1.4
Step = Callable[[], object]


def _models() -> dict[str, tuple[Callable[[], Any], Any, int]]:
    """By name: a model, a batch of inputs, and the number of classes."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
            self.embedding, self.head = nn.Embedding(256, 128), nn.Linear(128, 10)
            self.body = nn.TransformerEncoder(layer, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.body(self.embedding(x))[:, 0])

    def quickstart() -> Any:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip

    def perceptron() -> Any:
        sizes = ((784, 256), (256, 128), (128, 10))
        layers = [layer for a, b in sizes for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return {
        "quickstart, batch of 64": (quickstart, torch.rand(64, 1, 8, 8), 10),
        "quickstart, 16: one of 4 cores": (quickstart, torch.rand(16, 1, 8, 8), 10),
        "784-256-128-10, batch of 64": (perceptron, torch.rand(64, 784), 10),
        "transformer, 8 x 64 tokens": (Transformer, torch.randint(256, (8, 64)), 10),
    }


def _step(device: str, make: Callable[[], Any], x: Any, classes: int) -> Step:
    import torch

    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    y = torch.arange(len(x)) % classes

    def step() -> object:
        loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _milliseconds(step: Step, count: int) -> list[float]:
    times = []
    for _ in range(count):
        before = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - before))
    return times


def measure(rounds: int, steps: int) -> str:
    """Measure each model on both devices alternately, with one thread and one a processor."""
    import torch

    from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install

    install()
    rows = [("step of", "threads", "CPU, ms", "rehearsed TPU, ms", "ratio", f"goal: {GOAL}")]
    for threads in (1, os.cpu_count() or 2):
        torch.set_num_threads(threads)
        for name, (make, x, classes) in _models().items():
            sides = {device: _step(device, make, x, classes) for device in ("cpu", "tpu")}
            taken = {device: Samples() for device in sides}
            for step in sides.values():
                _milliseconds(step, 5)
            for _ in range(rounds):
                for device, step in sides.items():
                    taken[device].add(_milliseconds(step, steps))
            ratio = taken["tpu"].over(taken["cpu"])
            times = [f"{samples.median():.2f}" for samples in taken.values()]
            rows.append((name, str(threads), *times, ratio.text(2), met(ratio, most=GOAL)))
    return table(rows)
