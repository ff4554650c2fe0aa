"""Which samples a rank gets in each step. Pure arithmetic: rank and world size are arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Rest = Literal["pad", "drop", "repeat"]
RESTS: tuple[Rest, ...] = get_args(Rest)


def share(count: int, rank: int, world: int) -> tuple[int, int]:
    """First and end of a rank's part of `count` samples; parts differ by one at the most."""
    return rank * count // world, (rank + 1) * count // world


@dataclass(frozen=True)
class Deal:
    """Positions in an order of samples, dealt to steps and within them to ranks.

    A step holds up to `batch_size * world` samples, in order; ranks have consecutive parts of
    it, equally many but for one. So ranks one after the other, and steps one after the other,
    give the order again.
    """

    positions: torch.Tensor
    """int64; those of a step are together."""
    steps: Sequence[tuple[int, int]]
    """First and end in `positions` of each step."""
    batch_size: int
    world: int

    def count(self, step: int) -> int:
        """How many samples of all ranks count in a step."""
        first, end = self.steps[step]
        return end - first

    def of_step(self, step: int) -> torch.Tensor:
        """The positions of a step: those of rank 0, then those of rank 1, and so on."""
        first, end = self.steps[step]
        return self.positions[first:end]

    def of_rank(self, step: int, rank: int) -> torch.Tensor:
        """`batch_size` positions: this rank's, then fillers, which do not count.

        Fillers are a sample of the same step, so that it is of the same group.
        """
        begin, count = self.steps[step][0], self.count(step)
        first, end = share(count, rank, self.world)
        mine = self.positions[begin + first : begin + end]
        missing = self.batch_size - (end - first)
        if not missing:
            return mine
        return torch.cat([mine, self.positions[begin : begin + 1].expand(missing)])


def deal(
    count: int,
    batch_size: int,
    world: int,
    rest: Rest,
    *,
    groups: torch.Tensor | None = None,
    shuffle: torch.Generator | None = None,
) -> Deal:
    """Deal `count` samples to steps of `batch_size` on each of `world` ranks.

    `rest`: what becomes of a last step that is not full: it stays as it is and is filled with
    what does not count ('pad'), it is left out ('drop'), or it is filled with the first samples
    once more ('repeat'). `groups`: a number for each sample; a step has samples of one group.
    Groups follow each other as their first samples do, or with `shuffle` (a generator, in the
    same state on all ranks) steps are in random order.
    """
    whole = batch_size * world
    if groups is None:
        parts: Iterator[torch.Tensor] = iter([torch.arange(count)] if count else [])
    else:
        parts = _by_group(groups)
    dealt: list[torch.Tensor] = []
    steps: list[tuple[int, int]] = []
    first = 0
    for part in parts:
        over = len(part) % whole
        if over and rest == "drop":
            part = part[: len(part) - over]
        elif over and rest == "repeat":
            more = torch.arange(whole - over) % len(part)
            part = torch.cat([part, part[more]])
        end = first + len(part)
        steps += [(at, min(at + whole, end)) for at in range(first, end, whole)]
        dealt.append(part)
        first = end
    if shuffle is not None and groups is not None:
        steps = [steps[at] for at in torch.randperm(len(steps), generator=shuffle).tolist()]
    empty = torch.empty(0, dtype=torch.int64)
    return Deal(torch.cat([empty, *dealt]), steps, batch_size, world)


def _by_group(groups: torch.Tensor) -> Iterator[torch.Tensor]:
    """The positions of each group, in order."""
    _, group_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    together = group_of.argsort(stable=True).split(sizes.tolist())
    return iter(sorted(together, key=lambda part: int(part[0])))
