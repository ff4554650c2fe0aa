"""Notes which parameters the optimizers of this rank step, and samples them at its end.

The ranks' samples show whether all have trained one model (tpunb.runs.trained_models). In a step
this counts only, which takes some microseconds. Values are read at the end of the train cell, or
before when the model ends: from parameters that are small enough to be copied whole, so that
nothing is compiled for it. No parameter is kept alive.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from tpunb.backends.rehearsal.call import RankCall, running_line, users_frames
from tpunb.backends.rehearsal.stats import collective_stats
from tpunb.backends.torch.exchanges import PAIRWISE
from tpunb.backends.xla import tensors
from tpunb.runs.trained_models import (
    Numbers,
    SteppedModel,
    SteppedParameter,
    positions,
    write_models,
)
from tpunb.utils.frame_locals import locals_of

MOST_MODELS = 4
"""Models that are compared: the ones that began last."""
MOST_PARAMETERS = 64
"""Parameters of each model that are compared, evenly spaced."""
LARGEST = 1 << 16
"""Numbers of a parameter that is compared. Of a model without such, the smallest is."""
_FEW = 64
"""Numbers in a collective that are more likely metrics than a part of a model."""
_SHAPE = re.compile(r"\[([\d, ]*)\]")


class SteppedModels:
    """The models that the optimizers of this rank have stepped."""

    def __init__(self) -> None:
        self._alone = False
        self._models: list[_Model] = []
        self._known: WeakKeyDictionary[Optimizer, _Model | None] = WeakKeyDictionary()

    def watch(self, groups: bool) -> None:
        """Watch all optimizers and collectives, for the rest of this process.

        `groups`: whatever this rank exchanges, it needs a process group.
        """
        self._alone = groups
        register_optimizer_step_post_hook(self.stepped)
        collective_stats.watchers.append(self.exchanged)

    def stepped(self, optimizer: Optimizer, args: object, options: object) -> None:
        """A torch.optim hook for the end of an optimizer's step."""
        if torch.compiler.is_compiling():
            return
        self._alone = self._alone and not _has_group()
        if optimizer not in self._known:
            self._known[optimizer] = self._begin(optimizer)
        model = self._known[optimizer]
        if model is not None:
            model.end_step()

    def exchanged(self, call: RankCall, size: int) -> None:
        """Note a collective of this rank; `size`: bytes, if it has sent Python objects."""
        self._alone = False
        for model in self._models:
            model.exchanged(call, size)

    def _begin(self, optimizer: Optimizer) -> _Model | None:
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        parameters = [p for p in parameters if p.numel()]
        if not parameters or any(map(tensors.is_shard, parameters)):
            return None
        if _steps_shards(optimizer, parameters):
            return None
        model = _Model(optimizer, parameters)
        # An optimizer that was made again, for the next round, replaces the one before.
        kept = [each for each in self._models if each.first() is not parameters[0]]
        self._models = [*kept, model][-MOST_MODELS:]
        return model

    def save(self, path: Path) -> None:
        """Write the models of this rank, after the device's pending work has finished."""
        alone = self._alone and not _has_group()
        found = [model.sampled(alone) for model in self._models]
        with contextlib.suppress(OSError):  # a full disk: the result reports it
            write_models(path, [model for model in found if model is not None])


stepped_models = SteppedModels()
"""The stepped models of this process."""


class _Model:
    """What one optimizer has stepped."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer = type(optimizer).__name__
        self._place = str(running_line() or "")
        self._shapes = {tuple(each.shape) for each in parameters}
        self._size = sum(each.numel() for each in parameters)
        self.first = ref(parameters[0])
        names, modules = _names(parameters)
        small = [each for each in parameters if each.numel() <= LARGEST]
        small = small or [min(parameters, key=torch.Tensor.numel)]
        numbers = {id(each): number for number, each in enumerate(parameters, 1)}
        self._samples = {
            names.get(id(each), f"parameter {numbers[id(each)]} of {self._optimizer}"): ref(each)
            for each in small[:: math.ceil(len(small) / MOST_PARAMETERS)]
        }
        self._last: SteppedModel | None = None
        # Python calls back before it frees what the owner has, so its parameters can still be read;
        # but not if the owner is in a cycle.
        self._owners = [ref(owner, self._owner_ends) for owner in (optimizer, *modules)]
        rates = (group.get("lr") for group in optimizer.param_groups)
        self._rates = tuple(float(rate) for rate in rates if isinstance(rate, float | int))
        self._steps = 0
        self._numbers, self._others = 0, False
        """Exchanged since the last step: numbers that may be the model's; whether others."""
        self._with_others = 0
        """Steps after such others."""

    def exchanged(self, call: RankCall, size: int) -> None:
        """Note a collective. Without tensors, it has sent Python objects of this size."""
        self._numbers += 0 if call.tensors else size // 4
        self._others |= call.operation in PAIRWISE
        for shape, numbers, pickled in _shapes(call.tensors):
            if pickled or shape in self._shapes or shape == (self._size,):
                self._numbers += numbers
            else:
                self._others |= len(shape) > 1 and numbers > _FEW

    def end_step(self) -> None:
        self._steps += 1
        self._with_others += self._others
        self._numbers, self._others = 0, False

    def _tolerance(self, dtype: torch.dtype) -> float:
        """The relative difference to which rounding may add up, like a random walk."""
        return min(max(1e-5, 4 * torch.finfo(dtype).eps * math.sqrt(self._steps)), 0.02)

    def _owner_ends(self, _: object) -> None:
        """Sample the parameters, which may end with their owner."""
        kept = [parameter() for parameter in self._samples.values()]
        alive = [each for each in kept if each is not None]
        if len(alive) == len(kept):
            self._last = self._sampled(alive) if tensors.are_computed(alive) else None

    def sampled(self, alone: bool) -> SteppedModel | None:
        """The newest samples; None if there are none."""
        self._owner_ends(None)
        return self._last and replace(self._last, alone=alone)

    def _sampled(self, kept: Sequence[torch.Tensor]) -> SteppedModel | None:
        """The samples. Copies the parameters to the CPU, in one transfer."""
        try:
            copy = tensors.CpuCopies([*kept])
        except RuntimeError:  # a buffer was deleted or given away: it can no longer be compared
            return None
        parameters = [
            SteppedParameter(
                name, tuple(each.shape), self._tolerance(each.dtype), _sample(copy(each))
            )
            for name, each in zip(self._samples, kept, strict=True)
        ]
        return SteppedModel(
            optimizer=self._optimizer,
            place=self._place,
            rates=self._rates,
            alone=False,
            parts=2 * self._with_others >= self._steps,
            collected=self._numbers >= self._size,
            parameters=tuple(parameters),
        )


@functools.lru_cache(maxsize=512)
def _shapes(described: Sequence[str]) -> list[tuple[tuple[int, ...], int, bool]]:
    """The shape of each tensor, its numbers, and whether it may be of pickled ones."""
    found = []
    for each in described:
        match = _SHAPE.search(each)
        shape = tuple(map(int, filter(None, match[1].split(",")))) if match else ()
        pickled = "uint8" in each and len(shape) == 1
        found.append((shape, math.prod(shape) // (4 if pickled else 1), pickled))
    return found


def _has_group() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized()


def _sample(tensor: torch.Tensor) -> Numbers:
    """Some numbers of a tensor on the CPU; of complex ones the absolute value."""
    flat = tensor.detach().flatten()[list(positions(tensor.numel()))]
    numbers = (flat.abs() if flat.is_complex() else flat).double().tolist()
    return tuple(each if math.isfinite(each) else None for each in numbers)


def _names(
    parameters: Sequence[torch.Tensor],
) -> tuple[dict[int, str], Iterable[torch.nn.Module]]:
    """Names of parameters, by id, from the modules that the user's running code names; those."""
    wanted = set(map(id, parameters))
    names: dict[int, str] = {}
    modules = {}
    for name, module in _modules():
        for inner, parameter in module.named_parameters():
            if id(parameter) in wanted:
                modules[id(module)] = module
                names.setdefault(id(parameter), f"{name}.{inner}")
    return names, modules.values()


def _modules() -> Iterator[tuple[str, torch.nn.Module]]:
    frames = users_frames()
    for scope in (*map(locals_of, frames), *(frame.f_globals for frame in frames[-1:])):
        for name, value in [*scope.items()]:
            if isinstance(value, torch.nn.Module) and not name.startswith("_"):
                yield name, value


def _steps_shards(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """True within the step of another optimizer with other parameters: ZeRO's steps its shards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        outer: Any = locals_of(frame).get("self") if frame.f_code.co_name == "step" else None
        if isinstance(outer, Optimizer) and outer is not optimizer:
            own = {id(each) for group in outer.param_groups for each in group["params"]}
            return not any(id(each) in own for each in parameters)
        frame = frame.f_back
    return False
