"""One rank's batches of a stream of samples that every rank reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import IterableDataset

from tpunb.training.dealing import Rest, share


class RankStream(IterableDataset[tuple[Any, int]]):
    """Reads samples for a step of all ranks, and collates those of one.

    How many samples are left cannot be known before they are read, nor can a rank ask the
    others without meeting them. That every rank reads everything makes the last step the same
    on all, at the price of reading `world` times.
    """

    def __init__(
        self,
        samples: Any,
        batch_size: int,
        rest: Rest,
        collate: Callable[[list[Any]], Any],
        rank: int,
        world: int,
    ) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._rest = rest
        self._collate = collate
        self._rank = rank
        self._world = world

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Batches, each with the number of samples of all ranks that count in its step."""
        whole = self._batch_size * self._world
        stream = iter(self._samples)
        head: list[Any] = []  # for 'repeat': the samples of the first step
        while step := list(islice(stream, whole)):
            head = head or step
            if len(step) < whole and self._rest == "drop":
                return
            if len(step) < whole and self._rest == "repeat":
                step = step + list(islice(cycle(head), whole - len(step)))
            first, end = share(len(step), self._rank, self._world)
            fillers = [step[0]] * (self._batch_size - (end - first))
            yield self._collate(step[first:end] + fillers), len(step)
