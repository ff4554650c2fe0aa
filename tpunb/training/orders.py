"""The order of samples: the same on every rank, whatever sampler a loader has."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler


class Order:
    """The order in which a sampler gives its samples: of a seed and an epoch alone."""

    def __init__(self, sampler: Any, size: int, seed: int) -> None:
        self._sampler = sampler
        self._size = size
        self._seed = seed
        self._epoch = 0
        self._drawn: torch.Tensor | None = None
        distributed = isinstance(sampler, DistributedSampler)
        self.is_sequential = isinstance(sampler, SequentialSampler) or (
            distributed and not sampler.shuffle
        )
        # Of one permutation of everything. Others are drawn from the sampler itself.
        self._is_plain = distributed or (
            isinstance(sampler, RandomSampler)
            and not sampler.replacement
            and sampler.num_samples == size
        )
        if distributed:
            self._seed += sampler.seed

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._drawn = None
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed + self._epoch)

    def draw(self) -> torch.Tensor:
        """The order of this epoch."""
        if self.is_sequential:
            return torch.arange(self._size)
        if self._is_plain:
            return torch.randperm(self._size, generator=self.generator())
        if self._drawn is None:
            # Once in an epoch: a sampler may have a state of its own, and `len` asks too.
            self._drawn = torch.tensor(self._of_sampler(), dtype=torch.int64)
        return self._drawn

    def _of_sampler(self) -> list[int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed + self._epoch)
            own = getattr(self._sampler, "generator", None)
            if own is None:
                return list(self._sampler)
            self._sampler.generator = self.generator()
            try:
                return list(self._sampler)
            finally:
                self._sampler.generator = own
