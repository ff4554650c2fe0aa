"""`Throughput`: samples per second of a training that runs. `training_flops`: what one batch takes.

torch_xla 2.8 and 2.9 offer no estimate of XLA's own to Python: its extension module holds XLA's
cost analysis and does not export it; only a profile from a TPU shows it. So operations are
counted by torch.utils.flop_counter: matrix products, convolutions and attention, forward and
backward, which is what model FLOPs utilisation (MFU) means.
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tpunb.records import FLOPS, SPEED
from tpunb.training.checkpoint_device import runtime
from tpunb.training.counting import compilations
from tpunb.training.log import log
from tpunb.training.trees import leaves


class Throughput:
    """Samples per second of this rank, without the time that XLA compiles.

        speed = Throughput(flops=training_flops(model, x) / len(x))
        for x, y in batches:
            ...
            speed.add(len(x))
        speed.stop()

    Steps in which something was compiled, and the first, do not count. What it finds is logged
    (`tpunb.log`), so that `tpunb.compare` finds it. Nothing waits for the device but `stop()`.
    """

    def __init__(self, flops: float | None = None) -> None:
        """`flops`: floating-point operations that one sample takes."""
        self.flops = flops
        self._samples = 0
        self._seconds = 0.0
        self._last: tuple[float, int] | None = None

    def add(self, samples: int) -> None:
        """A step has ended, with so many samples in this rank."""
        now, compiled = time.perf_counter(), compilations()
        if self._last is not None and self._last[1] == compiled:
            self._samples += samples
            self._seconds += now - self._last[0]
        self._last = now, compiled

    def stop(self, step: int | None = None) -> float:
        """Wait for the last step; samples per second of this rank. Logs it, for this `step`.

        NaN where no step was free of compilation. Steps after it are counted anew.
        """
        if runtime() is not None:
            xm: Any = sys.modules["torch_xla.core.xla_model"]
            xm.wait_device_ops()
        if self._last is not None:
            self._seconds += time.perf_counter() - self._last[0]
        speed = self._samples / self._seconds if self._samples else float("nan")
        self._samples, self._seconds, self._last = 0, 0.0, None
        found = {SPEED: speed} if self.flops is None else {SPEED: speed, FLOPS: self.flops}
        log(step, reduce={SPEED: "sum"}, **found)
        return speed


def training_flops(model: nn.Module, *inputs: Any, **options: Any) -> int:
    """Floating-point operations of `model(*inputs, **options)` and its backward pass.

    Of the whole batch. Nothing is computed and the model is not touched: a copy without data
    (on torch's meta device) is run, which code that looks at values cannot be.
    """
    twin = copy.deepcopy(model).to("meta")

    def empty(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    with FlopCounterMode(display=False) as counter:
        made = twin(*map(empty, inputs), **{name: empty(value) for name, value in options.items()})
        outputs = [one for one in leaves(made) if isinstance(one, torch.Tensor)]
        torch.autograd.backward([one.sum() for one in outputs if one.requires_grad])
    return int(counter.get_total_flops())
