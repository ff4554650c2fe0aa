"""The models that the ranks of a run ended with: compared, and described if they differ.

Each rank writes samples of the parameters that its optimizers stepped (tpunb.worker.stepped). Only
what must be the same is compared: parameters of one name and shape, stepped in the same line on all
ranks. The numbers of ranks that have averaged gradients are equal, bit for bit; the tolerance is
for ranks that run different programs, in which XLA rounds differently.

Standard library only.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpunb.runs.spec import BackendName, ModelsCause
from tpunb.utils import files, records

SAMPLES = 16
"""Numbers of each parameter that are compared."""

Numbers = tuple[float | None, ...]
"""None for numbers that are not finite."""

_BY_HAND: Mapping[BackendName, str] = {
    "xla": "call xm.broadcast_master_param(model), then xm.optimizer_step(optimizer)",
    "torchtpu": "average with dist.all_reduce",
    "torch": "average with dist.all_reduce",
}
"""How a program averages without DistributedDataParallel, with what its run has."""


def positions(size: int) -> range:
    """The positions of the samples among `size` numbers, evenly spaced."""
    return range(0, size, max(1, size // SAMPLES))[:SAMPLES]


@dataclass(frozen=True)
class SteppedParameter:
    """Samples of one parameter at the end of a rank."""

    name: str
    """'model.0.weight', as the user's code names it; 'parameter 2 of SGD' if it does not."""
    shape: tuple[int, ...]
    tolerance: float
    """The largest relative difference that is no difference."""
    values: Numbers


@dataclass(frozen=True)
class SteppedModel:
    """Parameters that an optimizer of one rank has stepped, and what the rank exchanged."""

    optimizer: str
    """The class of the optimizer."""
    place: str
    """The line of its first step: 'cell [4], line 9: optimizer.step()'."""
    rates: tuple[float, ...]
    """The learning rates of the first step."""
    alone: bool
    """The rank had no process group, and exchanged nothing, although it needs one for that."""
    parts: bool
    """Before most steps it exchanged tensors that are neither gradients nor parameters."""
    collected: bool
    """It exchanged as many numbers as the model has after the last step."""
    parameters: tuple[SteppedParameter, ...]

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal on two ranks that hold the same model."""
        names = tuple((each.name, each.shape) for each in self.parameters)
        return self.optimizer, self.place, names


@dataclass(frozen=True)
class DifferentModels:
    """One number of a model that two ranks have trained, and that differs at their end."""

    cause: ModelsCause
    """What is known of the reason."""
    place: str
    """The line of the optimizer's first step."""
    parameter: str = ""
    """The parameter and the position in it: 'model.weight[0, 3]'; '' if all ranks trained alone,
    and equal models."""
    ranks: tuple[int, ...] = ()
    """The two ranks."""
    values: Numbers = ()
    """The number on each of them; None if it is not finite."""

    @property
    def expected(self) -> bool:
        """True if the program may intend the difference."""
        return self.cause is ModelsCause.PARTS

    def describe(self, backend: BackendName, name_rank: Callable[[int], str] = str) -> str:
        """Return the numbers, what is known of the reason, and the fix with the run's backend."""
        words = zip(_words(self.values), map(name_rank, self.ranks), strict=True)
        apart = " and ".join(f"{word} on rank {rank}" for word, rank in words)
        differ = f"at the end {self.parameter} is {apart}" if apart else ""
        if self.cause is ModelsCause.PARTS:
            return (
                f"the ranks hold different models: {differ}; they exchanged other data before most "
                "steps, as ranks do that hold parts of one model"
            )
        if self.cause is ModelsCause.ALONE:
            return (
                f"no rank had a process group at {self.place}: each trained by itself, with all of "
                f"the data that it read{f'; {differ}' if differ else ''}\n"
                "to train one model, call dist.init_process_group, wrap the model in "
                "DistributedDataParallel and give each rank its part of the data; with a library "
                "that does not know of ranks, use --cores 1"
            )
        return (
            f"{differ}; it was stepped at {self.place}\n"
            "to train one model, begin with the same weights and step with averaged gradients and "
            "the same learning rate: wrap it in DistributedDataParallel and call what that returns"
            f", or {_BY_HAND[backend]}. If each rank is meant to hold a model of its own, or a "
            "part of one, nothing is wrong"
        )


def _words(values: Numbers) -> list[str]:
    """The numbers, with enough digits to tell them apart."""
    for digits in (4, 6, 9, 17):
        words = ["not finite" if each is None else f"{each:.{digits}g}" for each in values]
        if len(set(words)) > 1:
            break
    return words


def write_models(path: Path, models: Sequence[SteppedModel]) -> None:
    """Write the models of this rank. Raises OSError."""
    files.atomic_write(path, json.dumps(to_json(models)).encode())


def read_models(path: Path) -> tuple[SteppedModel, ...]:
    """Read what `write_models` wrote; () if the rank has written nothing, or only a part."""
    try:
        return from_json(records.read(path))
    except (OSError, ValueError):
        return ()


def to_json(models: Sequence[SteppedModel]) -> list[Any]:
    return [asdict(model) for model in models]


def from_json(models: Any) -> tuple[SteppedModel, ...]:
    """Return what `to_json` was given; () if the values are of another form."""
    try:
        return tuple(records.convert(tuple[SteppedModel, ...], models))
    except ValueError:
        return ()


def find_difference(models: Mapping[int, Sequence[SteppedModel]]) -> DifferentModels | None:
    """Compare the models of all ranks; None if they are as they should be, or not one model.

    Of several differences, the first one that cannot be intended.
    """
    if len(models) < 2:
        return None
    alone = all(each.alone for own in models.values() for each in own)
    numbered = {rank: _numbered(own) for rank, own in models.items()}
    first = min(models)
    found = []
    for key in numbered[first]:
        if all(key in own for own in numbered.values()):
            found.append(
                _compare({rank: own[key] for rank, own in sorted(numbered.items())}, alone)
            )
    return min(filter(None, found), key=lambda each: each.expected, default=None)


def _numbered(models: Sequence[SteppedModel]) -> dict[tuple[object, ...], SteppedModel]:
    """The models by their identity, and by the order of those that share it."""
    seen: Counter[tuple[object, ...]] = Counter()
    found = {}
    for model in models:
        found[(*model.identity, seen[model.identity])] = model
        seen[model.identity] += 1
    return found


def _compare(models: Mapping[int, SteppedModel], alone: bool) -> DifferentModels | None:
    if any(model.collected for model in models.values()):
        return None
    first, *others = models
    one = models[first]
    if alone and any(models[other].rates != one.rates for other in others):
        return None  # trials with settings of their own
    worst, rank, index = max(
        (_distance(mine.values, theirs.values) / mine.tolerance, -other, -number)
        for other in others
        for number, (mine, theirs) in enumerate(
            zip(one.parameters, models[other].parameters, strict=True)
        )
    )
    if worst <= 1:
        return DifferentModels(ModelsCause.ALONE, one.place) if alone else None
    parts = all(model.parts for model in models.values())
    cause = ModelsCause.PARTS if parts else ModelsCause.DIFFERENT
    mine, theirs = one.parameters[-index], models[-rank].parameters[-index]
    at = max(range(len(mine.values)), key=lambda at: _apart(mine.values[at], theirs.values[at]))
    return DifferentModels(
        cause=ModelsCause.ALONE if alone else cause,
        place=one.place,
        parameter=mine.name + _position(positions(math.prod(mine.shape))[at], mine.shape),
        ranks=(first, -rank),
        values=(mine.values[at], theirs.values[at]),
    )


def _distance(one: Numbers, other: Numbers) -> float:
    """The distance of two vectors, relative to the longer one."""
    apart = math.hypot(*map(_apart, one, other))
    size = max(math.hypot(*(each or 0.0 for each in numbers)) for numbers in (one, other))
    return apart / size if apart and size else apart


def _apart(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other)


def _position(number: int, shape: tuple[int, ...]) -> str:
    """'[0, 3]' for a position in a tensor of this shape; '' in one without dimensions."""
    indexes: list[int] = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        indexes.insert(0, index)
    return f"{indexes}" if shape else ""
