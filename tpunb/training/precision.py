"""`bf16`: compute in bfloat16, sum in float32. `watch_sums`: detect weights that stop moving."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import ContextDecorator, ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tpunb.backends.xla.attention import cast_attention
from tpunb.backends.xla.runtime import running_module
from tpunb.backends.xla.spmd import parse_flag
from tpunb.training.collectives import accelerator

DOWNCASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
CHECKED_STEPS = (10, 1000)
"""Steps in which weights are checked: once Adam's updates have settled, and a late one."""
WARN_SHARE = 0.5
"""The share of unmoved weights above which to warn."""
_SHORT = (torch.bfloat16, torch.float16)


def bf16(enabled: bool = True) -> _Autocast:
    """Return a context manager, also a decorator, that computes in bfloat16 where that is safe.

        with bf16():
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    It enters `torch.autocast` for the CPU and for the device: "tpu", "cuda" or, once this process
    uses an XLA device (in the kernel, a rehearsal or on a TPU), "xla". Matrix products,
    convolutions and attention run in bfloat16; weights, gradients, losses, sums and the optimizer
    stay in float32.

    `enabled`: False turns it off, as in `torch.autocast`. Warns if XLA_USE_BF16 or
    XLA_DOWNCAST_BF16 is set, which stores every float32 tensor as bfloat16.
    """
    for name in DOWNCASTS:
        if parse_flag(os.environ.get(name, "")):
            warnings.warn(
                f"{name} is set: torch_xla stores every float32 tensor as bfloat16, weights and "
                "sums too, though their dtype says float32. Remove it: bf16() does not need it",
                stacklevel=2,
            )
    return _Autocast(enabled)


class _Autocast(ContextDecorator):
    """Autocast for all devices in use: a notebook that has started XLA may still train on the CPU.

    Like torch.autocast, and unlike a context manager made from a generator, it can be re-entered.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        kinds = ["cpu"]
        if running_module() is not None:
            cast_attention()
            kinds.append("xla")
        elif (device := accelerator()) is not None:
            kinds.append(device.type)
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16, enabled=self._enabled))
        self._entered.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def watch_sums(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer warn if its 16-bit weights stop moving.

    bfloat16 has 8 significant bits: an update below 1/512 of a weight is lost, however often it
    is added, so a training stalls although its gradients are not 0. The steps 10 and 1000 of the
    optimizer are checked: a UserWarning reports it if more than half of the weights that have a
    gradient did not change.

    `optimizer_step` and `Accumulation` call this. Nothing waits for the device; on XLA, a checked
    step compiles a program of its own. With float32 weights it does nothing.
    """
    short = any(p.dtype in _SHORT for group in optimizer.param_groups for p in group["params"])
    if short and optimizer not in _watched:
        _watched[optimizer] = watch = _Watch()
        optimizer.register_step_pre_hook(watch.before)
        optimizer.register_step_post_hook(watch.after)


class _Watch:
    """The hooks of one optimizer. They hold no reference to it, so that it can be freed."""

    def __init__(self) -> None:
        self._step = 0
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        """Copy the weights that the step should change, in a step that is checked."""
        self._step += 1
        if self._step in CHECKED_STEPS:
            self._before = [
                (p, p.detach().clone())
                for group in optimizer.param_groups
                for p in group["params"]
                if p.dtype in _SHORT and p.grad is not None
            ]

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, *call: Any) -> None:
        """Count the weights that the step did not change."""
        checked, self._before = self._before, []
        if not checked:
            return
        counts = []
        for weight, before in checked:
            assert weight.grad is not None
            should = (weight.grad != 0) & (before != 0)
            lost = should & (weight == before)
            counts.append(torch.stack([lost.sum(), should.sum()]).float())
        _when_computed(self._warn, torch.stack(counts).sum(0), self._step, checked[0][0].dtype)

    @staticmethod
    def _warn(counts: torch.Tensor, step: int, dtype: torch.dtype) -> None:
        lost, should = counts.tolist()
        if should and lost / should > WARN_SHARE:
            name = str(dtype).removeprefix("torch.")
            warnings.warn(
                f"step {step} moved only {1 - lost / should:.0%} of the {name} weights that have a "
                f"gradient: for the others the update is too small for {name}. Keep the weights "
                "in float32 and compute in bfloat16: `with tpunb.training.bf16():`",
                stacklevel=2,
            )


_watched: WeakKeyDictionary[torch.optim.Optimizer, _Watch] = WeakKeyDictionary()


def _when_computed(callback: Any, value: torch.Tensor, *rest: Any) -> None:
    """Call back with a value once its step has been started; at once for a value on the CPU."""
    if value.device.type == "xla":
        xm: Any = sys.modules["torch_xla.core.xla_model"]
        xm.add_step_closure(callback, args=(value, *rest))
    else:
        callback(value, *rest)
