"""`Throughput`: samples per second of a training. `training_flops`: the operations of a batch.

torch_xla 2.8 and 2.9 do not export XLA's own cost analysis to Python; only a profile from a TPU
contains it. So torch.utils.flop_counter counts the operations: matrix products, convolutions and
attention, forward and backward, as model FLOPs utilisation (MFU) is defined.
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tpunb.backends.xla.counters import compilations
from tpunb.backends.xla.runtime import running_module
from tpunb.runs.metrics import FLOPS, SPEED
from tpunb.training.collectives import accelerator
from tpunb.training.log import log
from tpunb.training.trees import leaves


class Throughput:
    """Measures the samples per second of this rank, without the time that XLA compiles.

        speed = Throughput(flops=training_flops(model, x) / len(x))
        for x, y in batches:
            ...
            speed.add(len(x))
        speed.stop()

    The first step and steps in which XLA compiled do not count. `stop()` logs the result with
    `tpunb.log`, as the metric `samples_per_second` that `tpunb.scaling` reads, summed over ranks.
    Only `stop()` waits for the device.
    """

    def __init__(self, flops: float | None = None) -> None:
        """`flops`: floating-point operations per sample; logged too, as `flops_per_sample`."""
        self.flops = flops
        self._samples = 0
        self._seconds = 0.0
        self._last: tuple[float, int] | None = None

    def add(self, samples: int) -> None:
        """Count a step that has ended, with its number of samples in this rank."""
        now, compiled = time.perf_counter(), compilations()
        if self._last is not None and self._last[1] == compiled:
            self._samples += samples
            self._seconds += now - self._last[0]
        self._last = now, compiled

    def stop(self, step: int | None = None) -> float:
        """Wait for the last step; log and return the samples per second of this rank.

        `step`: the step of the log entry. The result is NaN if XLA compiled in every step. A
        later `add` starts a new measurement.
        """
        if running_module() is not None:
            xm: Any = sys.modules["torch_xla.core.xla_model"]
            xm.wait_device_ops()
        elif accelerator() is not None:
            torch.accelerator.synchronize()
        if self._last is not None:
            self._seconds += time.perf_counter() - self._last[0]
        speed = self._samples / self._seconds if self._samples else float("nan")
        self._samples, self._seconds, self._last = 0, 0.0, None
        metrics = {SPEED: speed} if self.flops is None else {SPEED: speed, FLOPS: self.flops}
        log(step, reduce={SPEED: "sum"}, **metrics)
        return speed


def training_flops(model: nn.Module, *inputs: Any, **options: Any) -> int:
    """Count the floating-point operations of `model(*inputs, **options)` and its backward pass.

    The count is for the whole batch. Nothing is computed and the model does not change: a copy
    without data runs on torch's meta device, which fails for models whose code reads values.
    """
    twin = copy.deepcopy(model).to("meta")

    def empty(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    with FlopCounterMode(display=False) as counter:
        result = twin(
            *map(empty, inputs), **{name: empty(value) for name, value in options.items()}
        )
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        torch.autograd.backward([each.sum() for each in tensors if each.requires_grad])
    return int(counter.get_total_flops())
