"""What optimizer steps do to gradients and parameters: nothing, or with gradients that pile up."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tpunb.diagnostics.cell.gradients import OptimizerStats
from tpunb.diagnostics.cell.recorder_torch import TorchRecorder

_SAMPLE = 256
"""Number of values of each parameter that are compared before and after a step."""
_HALF = (torch.float16, torch.bfloat16)
_FEW = 0.1
"""Share of values of float16 and bfloat16 parameters below which changes are lost in rounding."""


@dataclass
class Moved:
    """How a parameter's values have changed in the inspected steps."""

    parameter: torch.Tensor
    steps: int
    counts: torch.Tensor
    """Values that changed, and those that had a gradient other than 0."""


@dataclass(frozen=True)
class Still:
    """Parameters that hardly change, or not at all."""

    parameters: list[torch.Tensor]
    share: float
    """The share of values with a gradient that a step changes."""
    half: bool


class Updates:
    """Checks each optimizer step (see `Gradients.checks`)."""

    def __init__(self, recorder: TorchRecorder) -> None:
        self._recorder = recorder
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], ...]] = {}
        """By optimizer: the gradient of its first parameter before and after its last step, which
        differ if a closure computes it again."""
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._moved: dict[int, dict[int, Moved]] = {}
        self.kept: dict[int, int] = {}
        """By optimizer: steps whose gradients were added to those of the step before."""

    def before(self, stepped: OptimizerStats, inspected: bool) -> None:
        gradient = _first_gradient(stepped)
        last = self._gradients.get(id(stepped.optimizer), ())
        same = gradient is not None and len(last) == 2 and all(ref() is gradient for ref in last)
        self._gradients[id(stepped.optimizer)] = _reference(gradient)
        if same and id(gradient) not in self._recorder.overwritten:
            self.kept[id(stepped.optimizer)] = self.kept.get(id(stepped.optimizer), 0) + 1
        self._before = []
        for parameter in stepped.parameters() if inspected else ():
            if (sample := _sample(parameter)) is not None and parameter.grad is not None:
                moves = _sample(parameter.grad)
                if moves is not None:
                    self._before.append((parameter, sample.clone(), moves != 0))

    def after(self, stepped: OptimizerStats) -> None:
        if (gradient := _first_gradient(stepped)) is not None:
            self._gradients[id(stepped.optimizer)] += _reference(gradient)
            self._recorder.overwritten.discard(id(gradient))
        known = self._moved.setdefault(id(stepped.optimizer), {})
        for parameter, old, moves in self._before:
            new = _sample(parameter)
            if new is None or new.shape != old.shape:
                continue
            counts = torch.stack([((new != old) & moves).sum(), moves.sum()])
            moved = known.setdefault(id(parameter), Moved(parameter, 0, torch.zeros_like(counts)))
            moved.steps += 1
            moved.counts += counts
        self._before = []

    def still(self, stepped: OptimizerStats) -> Iterator[Still]:
        """The parameters of an optimizer that do not change, by their dtype."""
        found: dict[bool, list[tuple[torch.Tensor, float]]] = {}
        for moved in self._moved.get(id(stepped.optimizer), {}).values():
            changed, possible = moved.counts.tolist()
            half = moved.parameter.dtype in _HALF
            if moved.steps < 3 or not possible or changed > (_FEW * possible if half else 0):
                continue
            found.setdefault(half, []).append((moved.parameter, changed / possible))
        for half, entries in found.items():
            share = sum(share for _, share in entries) / len(entries)
            yield Still([parameter for parameter, _ in entries], share, half)


def _first_gradient(stepped: OptimizerStats) -> torch.Tensor | None:
    return next((p.grad for p in stepped.parameters() if p.grad is not None), None)


def _reference(tensor: torch.Tensor | None) -> tuple[weakref.ref[torch.Tensor], ...]:
    return () if tensor is None else (weakref.ref(tensor),)


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Some values of a plain tensor, without a copy if it is contiguous."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.detach().reshape(-1)[:_SAMPLE] if plain and tensor.is_floating_point() else None
