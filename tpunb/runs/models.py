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
    gradient: Numbers = ()
    """The gradient at the same positions; () if there is none, or if it is zero."""


@dataclass(frozen=True)
class SteppedModel:
    """Parameters that an optimizer of one rank has stepped, and what the ranks exchanged before."""

    optimizer: str
    """The class of the optimizer."""
    place: str
    """The line of its first step: 'cell [4], line 9: optimizer.step()'."""
    steps: int
    rates: tuple[float, ...]
    """The mean learning rate of each parameter group, over the steps."""
    averaged: int
    """The steps before which the ranks exchanged tensors like the gradients or the parameters."""
    last_averaged: int
    """The last of them, counted from 1; 0 for none."""
    averaged_at: str
    """The line of that exchange; '' if it is not known."""
    averaged_later: bool
    """True if there was such an exchange after the last step."""
    exchanged: int
    """The other steps before which the ranks exchanged data, more than a few numbers."""
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
    """Why the models differ."""
    parameter: str
    """The parameter and the position in it: 'model.weight[0, 3]'."""
    ranks: tuple[int, int]
    """The two ranks."""
    values: tuple[float | None, float | None]
    """The number on each of them; None if it is not finite."""
    place: str
    """The line of the optimizer's first step."""
    steps: int
    """The optimizer's steps."""
    rates: tuple[float, float] | None
    """The mean learning rates of the two ranks, if they differ."""
    last_averaged: int
    """The last step before which the ranks averaged gradients or parameters; 0 for none."""
    averaged_at: str
    """The line in which they did; '' if it is not known."""

    @property
    def expected(self) -> bool:
        """True if the program may intend the difference."""
        return self.cause is ModelsCause.UNKNOWN

    def describe(self, backend: BackendName, name_rank: Callable[[int], str] = str) -> str:
        """Return the numbers, the likely cause, and the fix with the run's backend."""
        xla = backend == "xla"
        ranks = [f"rank {name_rank(rank)}" for rank in self.ranks]
        text = f"at the end {self.parameter} is {_on_both(_words(self.values), ranks)}"
        match self.cause:
            case ModelsCause.NOT_AVERAGED:
                return (
                    f"{text}: gradients were not averaged before {self.place}\n"
                    "to train one model, wrap it in DistributedDataParallel, or "
                    + (
                        "call xm.optimizer_step(optimizer) instead of optimizer.step()"
                        if xla
                        else "average the gradients with dist.all_reduce before optimizer.step()"
                    )
                )
            case ModelsCause.LEARNING_RATE:
                rates = _on_both(_words(self.rates or ()), ranks)
                return (
                    f"{text}: the gradients were averaged, but the mean learning rate was {rates}\n"
                    "compute it from values that are the same on all ranks: for ReduceLROnPlateau, "
                    f"average the loss with {'xm' if xla else 'dist'}.all_reduce first"
                )
            case ModelsCause.BEGINNING:
                return (
                    f"{text}: the gradients were averaged, so the models differed before training, "
                    "or were changed on one rank\n"
                    "call torch.manual_seed with the same number on all ranks before the model is "
                    "made, or after it "
                    + (
                        "xm.broadcast_master_param(model)"
                        if xla
                        else "dist.broadcast for each parameter, as DistributedDataParallel does"
                    )
                )
        if self.last_averaged:
            at = f", at {self.averaged_at}" if self.averaged_at else ""
            text += f"; last averaged after step {self.last_averaged - 1} of {self.steps}{at}"
        return f"the ranks hold different models: {text}"


def _on_both(words: Sequence[str], ranks: Sequence[str]) -> str:
    return " and ".join(f"{word} on {rank}" for word, rank in zip(words, ranks, strict=True))


def _words(values: Sequence[float | None]) -> list[str]:
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
    """Compare the models of all ranks; None if they are equal, or not meant to be.

    Of several differences, the first one that cannot be intended.
    """
    if len(models) < 2:
        return None
    numbered = {rank: _numbered(own) for rank, own in models.items()}
    first = min(models)
    found = []
    for key in numbered[first]:
        if all(key in own for own in numbered.values()):
            difference = _compare({rank: own[key] for rank, own in sorted(numbered.items())})
            found += [] if difference is None else [difference]
    return min(found, key=lambda each: each.expected, default=None)


def _numbered(models: Sequence[SteppedModel]) -> dict[tuple[object, ...], SteppedModel]:
    """The models by their identity, and by the order of those that share it."""
    seen: Counter[tuple[object, ...]] = Counter()
    found = {}
    for model in models:
        found[(*model.identity, seen[model.identity])] = model
        seen[model.identity] += 1
    return found


def _compare(models: Mapping[int, SteppedModel]) -> DifferentModels | None:
    if any(model.averaged_later for model in models.values()):
        return None
    first, *others = models
    one = models[first]
    worst, rank, index = max(
        (_distance(mine.values, theirs.values) / mine.tolerance, -other, -number)
        for other in others
        for number, (mine, theirs) in enumerate(
            zip(one.parameters, models[other].parameters, strict=True)
        )
    )
    if worst <= 1:
        return None
    other = models[-rank]
    mine, theirs = one.parameters[-index], other.parameters[-index]
    at = max(range(len(mine.values)), key=lambda at: _apart(mine.values[at], theirs.values[at]))
    rates = next(
        (pair for pair in zip(one.rates, other.rates, strict=False) if not math.isclose(*pair)),
        None,
    )
    return DifferentModels(
        cause=_cause(list(models.values()), rates),
        parameter=mine.name + _position(positions(math.prod(mine.shape))[at], mine.shape),
        ranks=(first, -rank),
        values=(mine.values[at], theirs.values[at]),
        place=one.place,
        steps=one.steps,
        rates=rates,
        last_averaged=one.last_averaged,
        averaged_at=one.averaged_at,
    )


def _cause(models: Sequence[SteppedModel], rates: tuple[float, float] | None) -> ModelsCause:
    # What came before the first step is not known, if the optimizer was not known by then.
    always = all(1 < model.steps <= model.averaged + 1 for model in models)
    agree = _gradients_agree(models)
    if agree or (agree is None and always):
        return ModelsCause.BEGINNING if rates is None else ModelsCause.LEARNING_RATE
    known = agree is False or all(model.steps > 1 for model in models)
    if known and all(not m.averaged and 2 * m.exchanged < m.steps for m in models):
        return ModelsCause.NOT_AVERAGED
    return ModelsCause.UNKNOWN


def _gradients_agree(models: Sequence[SteppedModel]) -> bool | None:
    """True if the last gradients are the same on all ranks; None if they are not known."""
    known = [
        [parameter.gradient for parameter in parameters]
        for parameters in zip(*(model.parameters for model in models), strict=True)
        if all(parameter.gradient for parameter in parameters)
    ]
    if not known:
        return None
    tolerance = max(parameter.tolerance for parameter in models[0].parameters)
    return all(_distance(first, each) <= tolerance for first, *rest in known for each in rest)


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
