"""`Throughput` counts the right steps only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tpunb.training import Throughput, throughput, training_flops


class Clock:
    """Time and compilations that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.compiled = 0
        self.logged: list[dict[str, Any]] = []
        monkeypatch.setattr(throughput.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(throughput, "compilations", lambda: self.compiled)
        monkeypatch.setattr(throughput, "running_module", lambda: None)
        monkeypatch.setattr(throughput, "log", self._log)

    def _log(self, step: int | None, reduce: dict[str, str], **values: float) -> None:
        self.logged.append({"step": step, "reduce": reduce, **values})


def test_throughput_ignores_steps_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    speed = Throughput(flops=5.0)
    for seconds, compiles in [(60, 1), (50, 1), (2, 0), (2, 0), (30, 1), (1, 0)]:
        clock.now += seconds
        clock.compiled += compiles
        speed.add(10)
    clock.now += 0.5  # the device has still to compute the last one
    assert speed.stop(7) == pytest.approx(30 / 5.5)
    (logged,) = clock.logged
    assert logged["samples_per_second"] == pytest.approx(30 / 5.5)
    assert (logged["step"], logged["flops_per_sample"]) == (7, 5.0)
    assert logged["reduce"] == {"samples_per_second": "sum"}


def test_throughput_of_compilation_only_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    speed = Throughput()
    speed.add(10)
    assert math.isnan(speed.stop())


def test_training_flops_of_linear_layers() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    forward = 2 * 10 * (32 * 64 + 64 * 8)
    weights, inputs = forward, 2 * 10 * 64 * 8  # the data needs no gradient
    assert training_flops(model, torch.zeros(10, 32)) == forward + weights + inputs
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_training_flops_with_keyword_inputs_and_dict_outputs() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
            return {"out": self.layer(x) * scale, "ids": torch.arange(3)}

    assert training_flops(Named(), x=torch.zeros(2, 4), scale=2.0) == 2 * 2 * 2 * 4 * 4
