"""`shard`: the same number of full batches for every rank, without dropping samples.

`partition` divides an order of samples among steps and ranks: pure arithmetic, with the world size
as an argument. `SampleOrder` is that order; `RankStream` divides a stream of samples.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice, starmap
from operator import attrgetter
from types import FrameType
from typing import Any, Literal, get_args

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from tpunb.training.ranks import rank_and_world

Remainder = Literal["pad", "drop", "repeat"]
REMAINDERS: tuple[Remainder, ...] = get_args(Remainder)

KEPT = tuple(
    "num_workers pin_memory timeout worker_init_fn multiprocessing_context generator "
    "prefetch_factor persistent_workers".split()
)
"""Options that a DataLoader keeps, like its collate_fn, when it is rebuilt with other batches."""


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    remainder: Remainder = "pad",
    shuffle: bool = False,
    seed: int = 0,
    groups: Sequence[int] | None = None,
) -> Shard:
    """Return this rank's batches of a dataset or DataLoader, as an iterable of epochs.

        batches = shard(dataset, 64, remainder="drop", shuffle=True)
        for epoch in range(epochs):
            batches.set_epoch(epoch)
            for x, y in batches:
                ...

    All ranks get the same number of batches of exactly `batch_size` samples, so that they meet at
    every collective and XLA compiles for one shape. `remainder` decides about the last samples,
    which do not fill a step of all ranks:

    - 'pad' (for evaluation and prediction): every sample counts exactly once. Batches are filled
      up with samples that do not count, and are yielded as `(batch, mask)`; `mask` is a bool
      tensor of `batch_size` elements, True for samples that count.
    - 'drop' (for training): they are left out of this epoch. Batches are yielded without a mask.
    - 'repeat' (for training): the step is filled up with the first samples. Batches are yielded
      without a mask.

    `data`: a dataset with a length, with `batch_size` samples for each rank and step (and
    `shuffle`); or a DataLoader, whose batch size, collate_fn, workers and sampler are kept
    (`remainder` replaces its `drop_last`, and a DistributedSampler only shuffles); or an
    IterableDataset that is the same on every rank, or a DataLoader of one. Random orders depend
    only on `seed` and the epoch: call `.set_epoch(epoch)`, as with a DistributedSampler. A
    sampler of your own must produce the same order on every rank.

    `groups`: a number for each sample of the dataset. All samples of a step, on all ranks, then
    belong to one group (for example one bucket, see `Buckets.groups`), and each group has a
    remainder of its own.

    The world size is read when a loop begins. In the kernel and in cells above the train cell
    there is one rank, which gets all samples.

    Raises TypeError for data that is not a dataset or a DataLoader, or without a batch size;
    ValueError for a DataLoader with a batch_sampler of its own or for options that do not fit
    `data`.
    """
    if remainder not in REMAINDERS:
        raise ValueError(f"shard: remainder={remainder!r}: use 'pad', 'drop' or 'repeat'")
    if isinstance(data, DataLoader):
        if batch_size is not None or shuffle:
            raise ValueError(
                "shard: a DataLoader has its own batch_size and shuffle: give them to the "
                "DataLoader, or give shard its dataset"
            )
        loader = data
    else:
        loader = _make_loader(data, batch_size, shuffle)
    if loader.batch_size is None:
        raise ValueError(
            "shard: this DataLoader has a batch_sampler of its own, or makes no batches, but shard "
            "must choose them. Give it a DataLoader with a batch_size (and `groups` where all "
            "samples of a batch must be of one kind)"
        )
    if not isinstance(loader.dataset, IterableDataset):
        return MapShard(loader, remainder, seed, groups)
    if groups is not None:
        raise ValueError("shard: groups needs a dataset with a length and indices")
    return StreamShard(loader, remainder)


def _make_loader(data: Any, batch_size: int | None, shuffle: bool) -> DataLoader[Any]:
    if isinstance(data, tuple):
        raise TypeError("shard: a tuple is not a dataset: use TensorDataset(x, y) for tensors")
    is_stream = isinstance(data, IterableDataset)
    if not is_stream and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(
            f"shard takes a dataset with __len__ and __getitem__, an IterableDataset, or a "
            f"DataLoader of one, not {type(data).__name__}. Loaders that move batches to a "
            "device go around it: MpDeviceLoader(shard(loader), device)"
        )
    if batch_size is None:
        raise TypeError("shard: give the batch size of one rank: shard(dataset, 64)")
    if shuffle and is_stream:
        raise ValueError("shard: an IterableDataset has its own order and cannot be shuffled here")
    if shuffle and len(data) == 0:
        shuffle = False  # RandomSampler refuses an empty dataset
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


@dataclass(frozen=True)
class Step:
    batch: Any
    """This rank's samples, collated."""
    count: int
    """The number of samples, over all ranks, that count."""
    positions: torch.Tensor | None
    """The indices of these samples in the dataset, in order of rank; None for a stream."""


class Shard(ABC):
    """The result of `shard`: each iteration over it is one epoch."""

    def __init__(self, loader: DataLoader[Any], remainder: Remainder) -> None:
        self.dataset: Dataset[Any] = loader.dataset
        assert loader.batch_size is not None  # shard has checked it
        self.batch_size: int = loader.batch_size
        self.remainder: Remainder = remainder
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the random order of the next epoch; pass the same number on every rank."""
        self.epoch = epoch

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """Iterate over the steps of an epoch with the positions of their samples, for `predict`."""

    def __iter__(self) -> Iterator[Any]:
        # Here and in `steps`, a variable of a generator would keep the batch alive.
        if self.remainder != "pad":
            return map(attrgetter("batch"), self.steps())
        rank, world = rank_and_world()
        everything = torch.ones(self.batch_size, dtype=torch.bool)

        def with_mask(step: Step) -> tuple[Any, torch.Tensor]:
            first, end = rank_slice(step.count, rank, world)
            mask = everything.clone()  # takes a tenth of the time of making and filling a new mask
            if end - first < self.batch_size:
                mask[end - first :] = False
            return step.batch, mask

        return map(with_mask, self.steps())


class MapShard(Shard):
    """The shard of a dataset with a length: every rank reads only its own samples."""

    def __init__(
        self,
        loader: DataLoader[Any],
        remainder: Remainder,
        seed: int,
        groups: Sequence[int] | None,
    ) -> None:
        super().__init__(loader, remainder)
        dataset: Any = loader.dataset
        self.size = len(dataset)
        self._order = SampleOrder(loader.sampler, self.size, seed)
        self._groups = None if groups is None else torch.as_tensor(groups)
        if self._groups is not None and self._groups.shape != (self.size,):
            raise ValueError(
                f"shard: groups has the shape {list(self._groups.shape)}, and the dataset "
                f"{self.size} samples: it needs one number for each"
            )
        self._completed_epoch: int | None = None
        self._batches = _RankBatches()
        kept = {name: getattr(loader, name) for name in KEPT}
        self._loader = DataLoader(
            loader.dataset, batch_sampler=self._batches, collate_fn=loader.collate_fn, **kept
        )

    @property
    def is_in_order(self) -> bool:
        """True if samples are yielded in the order of the dataset (within each group)."""
        return self._order.is_sequential

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._order.set_epoch(epoch)

    def partition(self, world: int) -> Partition:
        """Return the steps of this epoch; positions are indices of the dataset."""
        order = self._order.draw()
        parts = partition(
            len(order),
            self.batch_size,
            world,
            self.remainder,
            groups=None if self._groups is None else self._groups[order],
            shuffle=None if self.is_in_order else self._order.generator(),
        )
        return Partition(order[parts.positions], parts.steps, self.batch_size, world)

    def __len__(self) -> int:
        """The number of steps in an epoch, equal on every rank."""
        return len(self.partition(rank_and_world()[1]).steps)

    def __repr__(self) -> str:
        world = rank_and_world()[1]
        steps = self.partition(world).steps
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        rows = len(steps) * self.batch_size * world
        padding = rows - sum(end - first for first, end in steps)
        return (
            f"{self.size} samples in {len(steps)} steps of {self.batch_size} on {ranks}, "
            f"remainder={self.remainder!r}"
            + (f": {padding} of {rows} rows are padding" * (padding > 0))
        )

    def steps(self) -> Iterator[Step]:
        rank, world = rank_and_world()
        if self._completed_epoch == self.epoch and not self.is_in_order:
            warnings.warn(
                f"shard: this repeats the order of epoch {self.epoch}: call "
                "set_epoch(epoch) before each epoch",
                stacklevel=_users_level(),
            )
        parts = self.partition(world)
        self._batches.chosen = parts, rank
        number = count()

        def as_step(batch: Any) -> Step:
            step = next(number)
            return Step(batch, parts.count(step), parts.of_step(step))

        yield from map(as_step, self._loader)
        self._completed_epoch = self.epoch


class StreamShard(Shard):
    """The shard of an IterableDataset: every rank reads all samples and collates its own."""

    def __init__(self, loader: DataLoader[Any], remainder: Remainder) -> None:
        super().__init__(loader, remainder)
        if loader.num_workers > 1:
            raise ValueError(
                f"shard: {loader.num_workers} workers would each read the whole "
                f"{type(loader.dataset).__name__}: an IterableDataset has no indices to share. "
                "Use num_workers=1, or a dataset with a length"
            )
        self._given = loader
        self._collate: Any = loader.collate_fn

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def steps(self) -> Iterator[Step]:
        stream = RankStream(
            self.dataset, self.batch_size, self.remainder, self._collate, *rank_and_world()
        )
        kept = {name: getattr(self._given, name) for name in KEPT}
        kept["persistent_workers"] = False  # each epoch is a new stream
        batches = DataLoader(stream, batch_size=None, collate_fn=_identity, **kept)
        return starmap(partial(Step, positions=None), batches)


class _RankBatches(BatchSampler):
    """The indices of this rank's batches in one epoch, whose partition is set before it begins."""

    def __init__(self) -> None:
        self.chosen: tuple[Partition, int] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        assert self.chosen is not None
        parts, rank = self.chosen  # bound here: another epoch may begin while this one is read
        return (parts.of_rank(step, rank).tolist() for step in range(len(parts.steps)))


def _users_level() -> int:
    """Return the `stacklevel` of a warning of the caller for the user's line.

    Between them are frames of tpunb, and of the progress bar around a loop.
    """
    level, frame = 1, sys._getframe(1)
    while (outer := frame.f_back) is not None and _package(frame) in ("tpunb", "tqdm"):
        level, frame = level + 1, outer
    return level


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _identity(batch: Any) -> Any:
    return batch


def rank_slice(count: int, rank: int, world: int) -> tuple[int, int]:
    """Return the first and end index of a rank's part of `count` samples.

    The lengths of the parts differ by one at most.
    """
    return rank * count // world, (rank + 1) * count // world


@dataclass(frozen=True)
class Partition:
    """Positions in an order of samples, divided among steps and, within a step, among ranks.

    A step holds up to `batch_size * world` samples, in order; ranks get consecutive parts of it,
    whose lengths differ by one at most. So the parts of all ranks and steps, concatenated, are
    the order again.
    """

    positions: torch.Tensor
    """int64; the positions of a step are adjacent."""
    steps: Sequence[tuple[int, int]]
    """The first and end index in `positions` of each step."""
    batch_size: int
    world: int

    def count(self, step: int) -> int:
        """The number of samples, over all ranks, that count in a step."""
        first, end = self.steps[step]
        return end - first

    def of_step(self, step: int) -> torch.Tensor:
        """The positions of a step, in order of rank."""
        first, end = self.steps[step]
        return self.positions[first:end]

    def of_rank(self, step: int, rank: int) -> torch.Tensor:
        """Return `batch_size` positions: those of a rank, then padding, which does not count.

        The padding repeats a sample of the same step, so it belongs to the same group.
        """
        begin, count = self.steps[step][0], self.count(step)
        first, end = rank_slice(count, rank, self.world)
        own = self.positions[begin + first : begin + end]
        missing = self.batch_size - (end - first)
        if not missing:
            return own
        return torch.cat([own, self.positions[begin : begin + 1].expand(missing)])


def partition(
    count: int,
    batch_size: int,
    world: int,
    remainder: Remainder,
    *,
    groups: torch.Tensor | None = None,
    shuffle: torch.Generator | None = None,
) -> Partition:
    """Divide `count` samples among steps of `batch_size` on each of `world` ranks.

    `remainder`: a last step that is not full is kept, for padding to fill ('pad'); left out
    ('drop'); or filled with the first samples again ('repeat'). `groups`: a number for each
    sample; a step has samples of one group only. Groups are in the order of their first samples;
    with `shuffle` (a generator in the same state on all ranks) steps are in random order.
    """
    whole = batch_size * world
    if groups is None:
        parts: Iterator[torch.Tensor] = iter([torch.arange(count)] if count else [])
    else:
        parts = _by_group(groups)
    positions: list[torch.Tensor] = []
    steps: list[tuple[int, int]] = []
    first = 0
    for part in parts:
        over = len(part) % whole
        if over and remainder == "drop":
            part = part[: len(part) - over]
        elif over and remainder == "repeat":
            more = torch.arange(whole - over) % len(part)
            part = torch.cat([part, part[more]])
        end = first + len(part)
        steps += [(at, min(at + whole, end)) for at in range(first, end, whole)]
        positions.append(part)
        first = end
    if shuffle is not None and groups is not None:
        steps = [steps[at] for at in torch.randperm(len(steps), generator=shuffle).tolist()]
    empty = torch.empty(0, dtype=torch.int64)
    return Partition(torch.cat([empty, *positions]), steps, batch_size, world)


def _by_group(groups: torch.Tensor) -> Iterator[torch.Tensor]:
    _, group_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    together = group_of.argsort(stable=True).split(sizes.tolist())
    return iter(sorted(together, key=lambda part: int(part[0])))


class SampleOrder:
    """The order in which a sampler yields samples, made to depend only on a seed and an epoch.

    So it is the same on every rank, whatever sampler a loader has.
    """

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
        # One permutation of all samples. Other orders are drawn from the sampler itself.
        self._is_permutation = distributed or (
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
        """Return the order of this epoch: int64 indices of the dataset."""
        if self.is_sequential:
            return torch.arange(self._size)
        if self._is_permutation:
            return torch.randperm(self._size, generator=self.generator())
        if self._drawn is None:
            # Once per epoch: a sampler may have a state of its own, and `len` needs the order too.
            self._drawn = torch.tensor(self._draw_from_sampler(), dtype=torch.int64)
        return self._drawn

    def _draw_from_sampler(self) -> list[int]:
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


class RankStream(IterableDataset[tuple[Any, int]]):
    """Reads the samples of each step for all ranks, and collates those of one rank.

    The number of samples left is not known before they are read, and a rank cannot ask the others
    without a collective. Because every rank reads everything, all ranks have the same last step,
    at the price of reading the data `world` times.
    """

    def __init__(
        self,
        samples: Any,
        batch_size: int,
        remainder: Remainder,
        collate: Callable[[list[Any]], Any],
        rank: int,
        world: int,
    ) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._remainder = remainder
        self._collate = collate
        self._rank = rank
        self._world = world

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Yield batches, each with the number of samples over all ranks that count in its step."""
        whole = self._batch_size * self._world
        stream = iter(self._samples)
        head: list[Any] = []  # for 'repeat': the samples of the first step
        while step := list(islice(stream, whole)):
            if len(step) < whole and self._remainder == "drop":
                return
            if self._remainder == "repeat":
                head = head or step
                step = step + list(islice(cycle(head), whole - len(step)))
            size = len(step)
            first, end = rank_slice(size, self._rank, self._world)
            chosen = [step[first:end] + step[:1] * (self._batch_size - (end - first))]
            del step  # no sample is kept alive until the next step
            yield self._collate(chosen.pop()), size
