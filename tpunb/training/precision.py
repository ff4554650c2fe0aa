"""`bf16`: matrices in bfloat16, sums in float32. `watch_sums`: weights that no longer move."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import ContextDecorator, ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tpunb.spmd import is_yes
from tpunb.training.checkpoint_device import runtime

DOWNCASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
LOOKS_AT = (10, 1000)
"""The steps at which weights are looked at: when Adam's have found their size, and late."""
LOST = 0.5
"""The share of weights that do not move from which on it is told."""
_SHORT = (torch.bfloat16, torch.float16)


def bf16() -> _Autocast:
    """Compute in bfloat16 where that is safe.

        with bf16():
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    It is `torch.autocast`, for tensors of the CPU and, once this process uses an XLA device
    (kernel, rehearsal, TPU), for its tensors too: matrix products and convolutions in bfloat16;
    weights, gradients, losses, sums and the optimizer in float32. A decorator too.
    """
    for name in DOWNCASTS:
        if is_yes(os.environ.get(name, "")):
            warnings.warn(
                f"{name} is set: torch_xla then keeps every float32 in bfloat16, weights and sums "
                f"too, though their dtype says float32. Take it away: bf16() needs none",
                stacklevel=2,
            )
    return _Autocast()


class _Autocast(ContextDecorator):
    """Of all devices in use: a notebook that has started XLA may still train on the CPU.

    Like torch.autocast it can be used again, which a generator's context cannot.
    """

    def __init__(self) -> None:
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for kind in ("cpu",) if runtime() is None else ("cpu", "xla"):
            stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16))
        self._entered.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def watch_sums(optimizer: torch.optim.Optimizer) -> None:
    """Warn where weights of 16 bits stop moving: at the steps LOOKS_AT.

    bfloat16 has 8 significant bits: what is less than 1/512 of a weight is lost when it is
    added, however often that happens, so a training stands still though its gradients do not.
    `optimizer_step` and `Accumulation` call this by themselves. Nothing waits for the device;
    a step that is looked at is a program of its own on XLA. float32 weights cost nothing.
    """
    short = any(p.dtype in _SHORT for group in optimizer.param_groups for p in group["params"])
    if short and optimizer not in _watched:
        _watched[optimizer] = watch = _Watch()
        optimizer.register_step_pre_hook(watch.before)
        optimizer.register_step_post_hook(watch.after)


class _Watch:
    """Of one optimizer. It is called with the optimizer, and keeps none: it would live on."""

    def __init__(self) -> None:
        self._step = 0
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        """Keep the weights that the step is to change."""
        self._step += 1
        if self._step in LOOKS_AT:
            self._before = [
                (p, p.detach().clone())
                for group in optimizer.param_groups
                for p in group["params"]
                if p.dtype in _SHORT and p.grad is not None
            ]

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        """Count which it has not."""
        looked, self._before = self._before, []
        if not looked:
            return
        counts = []
        for weight, before in looked:
            assert weight.grad is not None
            should = (weight.grad != 0) & (before != 0)
            lost = should & (weight == before)
            counts.append(torch.stack([lost.sum(), should.sum()]).float())
        _when_computed(self._tell, torch.stack(counts).sum(0), self._step, looked[0][0].dtype)

    @staticmethod
    def _tell(counts: torch.Tensor, step: int, dtype: torch.dtype) -> None:
        lost, should = counts.tolist()
        if should and lost / should > LOST:
            name = str(dtype).removeprefix("torch.")
            warnings.warn(
                f"step {step} moved only {1 - lost / should:.0%} of the {name} weights that have a "
                f"gradient: for the others it is less than {name} can add to them. Keep the "
                "weights in float32 and compute in bfloat16: `with tpunb.training.bf16():`",
                stacklevel=2,
            )


_watched: WeakKeyDictionary[torch.optim.Optimizer, _Watch] = WeakKeyDictionary()


def _when_computed(tell: Any, value: torch.Tensor, *rest: Any) -> None:
    """Call with a value of the device once its step was started; on the CPU at once."""
    if value.device.type == "xla":
        xm: Any = sys.modules["torch_xla.core.xla_model"]
        xm.add_step_closure(tell, args=(value, *rest))
    else:
        tell(value, *rest)
