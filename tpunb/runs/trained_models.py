"""The models that the ranks of a run ended with: compared, and described if they differ.

Each rank writes a digest of the parameters that its optimizers stepped (tpunb.worker.stepped). What
averaging gradients makes equal, bit for bit, is recognised by the line of the optimizer's first
step, its class and its shapes. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpunb.utils import records

Digest = tuple[tuple[float, ...], ...]
"""Some numbers of each parameter; () for one that could no longer be read."""


@dataclass(frozen=True)
class SteppedModel:
    """A digest of the parameters that an optimizer of one rank has stepped."""

    identity: str
    """Equal on the ranks that train one model."""
    place: str
    """The line of the first step: 'cell [4], line 9: optimizer.step()'."""
    alone: bool
    """The rank had no process group, which it needs for any exchange."""
    tolerance: float
    """The largest relative difference that is no difference: XLA rounds differently in programs
    that differ."""
    values: Digest


@dataclass(frozen=True)
class DifferentModels:
    """A model that each rank has trained by itself."""

    place: str
    """The line of the optimizer's first step."""
    alone: bool
    """No rank had a process group."""
    ranks: tuple[int, ...] = ()
    """Two ranks whose models differ; () if those of all ranks are equal."""
    difference: float = 0.0
    """Of what was compared of them, relative to its size."""

    def describe(self, name_rank: Callable[[int], str] = str) -> str:
        """What was seen, and in a second line how several ranks train one model."""
        ranks = " and ".join(map(name_rank, self.ranks))
        differ = f"the models of ranks {ranks} differ by {self.difference:.2%} at the end"
        if self.alone:
            said = f"no rank had a process group at {self.place}: each trained by itself, "
            said += differ if self.ranks else "with all of the data that it read"
            return (
                f"{said}\nto train one model, call dist.init_process_group, wrap the model in "
                "DistributedDataParallel and give each rank its part of the data; with a library "
                "that does not know of ranks, use --cores 1"
            )
        return (
            f"{differ}; they were stepped at {self.place}\nto train one model, begin with the same "
            "weights and average the gradients before each step, as DistributedDataParallel does; "
            "if each rank is meant to hold a model of its own, nothing is wrong"
        )


def read_models(path: Path) -> tuple[SteppedModel, ...]:
    """Read what a rank wrote; () if it has written nothing, or only a part."""
    try:
        return from_json(records.read(path))
    except (OSError, ValueError):
        return ()


def from_json(models: Any) -> tuple[SteppedModel, ...]:
    """Return models from the JSON of them; () if it is of another form."""
    try:
        return tuple(records.convert(tuple[SteppedModel, ...], models))
    except ValueError:
        return ()


def find_difference(models: Mapping[int, Sequence[SteppedModel]]) -> DifferentModels | None:
    """Compare the models of all ranks; None if they are as they should be, or not one model."""
    if len(models) < 2:
        return None
    first, *others = sorted(models)
    found = []
    for mine, *theirs in zip(*(models[rank] for rank in (first, *others)), strict=False):
        if any(each.identity != mine.identity for each in theirs):
            continue  # models of some ranks only, or trials with settings of their own
        distances = [_distance(mine.values, each.values) for each in theirs]
        worst = max(distances)
        if worst > mine.tolerance:
            ranks = first, others[distances.index(worst)]
            found.append(DifferentModels(mine.place, mine.alone, ranks, worst))
        elif mine.alone:
            found.append(DifferentModels(mine.place, alone=True))
    return max(found, key=lambda each: each.difference, default=None)


def _distance(one: Digest, other: Digest) -> float:
    """The distance of the parameters that both have, relative to the larger ones."""
    mine: list[float] = []
    theirs: list[float] = []
    for a, b in zip(one, other, strict=False):
        if len(a) == len(b):
            mine += a
            theirs += b
    size = max(math.hypot(*mine), math.hypot(*theirs))
    return math.dist(mine, theirs) / size if size else 0.0
