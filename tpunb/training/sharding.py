"""`shard`: batches for every rank, equally many and equally large, with nothing dropped."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from tpunb.training.dealing import RESTS, Deal, Rest, deal, share
from tpunb.training.orders import Order
from tpunb.training.place import rank_and_world
from tpunb.training.streams import RankStream

KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
"""What a loader is given that is made again with other batches; and its collate_fn."""


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    rest: Rest = "pad",
    shuffle: bool = False,
    seed: int = 0,
    groups: Sequence[int] | None = None,
) -> Shard:
    """This rank's batches of a dataset or DataLoader.

        for (x, y), mask in shard(dataset, 64):

    All ranks get equally many batches of exactly `batch_size` samples, so that they meet at
    every collective and XLA compiles one shape. `rest` says what becomes of the samples at the
    end that fill no step of all ranks:

    - 'pad' (to evaluate, to predict): every sample counts exactly once. Batches are filled with
      samples that do not count, and come as `(batch, mask)`; `mask` is a bool tensor of
      `batch_size` elements, True for what counts.
    - 'drop' (to train): they are left out of this epoch. Batches come without a mask.
    - 'repeat' (to train): the first samples come once more. Batches come without a mask.

    `data`: a dataset with a length, with `batch_size` for each rank (and `shuffle`); or a
    DataLoader, whose batch size, collate_fn, workers and sampler are kept (`rest` replaces its
    `drop_last`, and a DistributedSampler deals no more, only shuffles); or either of an
    IterableDataset that is the same on every rank. Random orders depend on `seed` and the epoch
    alone: call `.set_epoch(epoch)`, as with a DistributedSampler. A sampler of your own must
    give every rank the same order.

    `groups`: a number for each sample of the dataset; a step has samples of one group only, on
    all ranks (of one bucket, see `Buckets.groups`). The end of each group is then a rest.

    In the kernel, and in a cell above the train cell, there is one rank with everything: the
    ranks are asked for when a loop begins. Raises TypeError and ValueError for what cannot be
    dealt in this way.
    """
    if rest not in RESTS:
        raise ValueError(f"shard: rest={rest!r}: it is 'pad', 'drop' or 'repeat'")
    if isinstance(data, DataLoader):
        if batch_size is not None or shuffle:
            raise ValueError(
                "shard: a DataLoader has its own batch_size and shuffle: give them to the "
                "DataLoader, or give shard its dataset"
            )
        loader = data
    else:
        loader = _loader(data, batch_size, shuffle)
    _check(loader)
    if not isinstance(loader.dataset, IterableDataset):
        return MapShard(loader, rest, seed, groups)
    if groups is not None:
        raise ValueError("shard: groups needs a dataset with a length and indices")
    return StreamShard(loader, rest)


class Dealt(NamedTuple):
    """One step."""

    batch: Any
    """This rank's samples, collated."""
    real: int
    """How many samples of all ranks together count."""
    positions: torch.Tensor | None
    """Where these are in the order of the samples, rank after rank; None for a stream."""


class Shard(ABC):
    """What `shard` gives: iterable any number of times, one epoch each."""

    def __init__(self, loader: DataLoader[Any], rest: Rest) -> None:
        self.dataset: Dataset[Any] = loader.dataset
        assert loader.batch_size is not None  # or it was refused
        self.batch_size: int = loader.batch_size
        self.rest: Rest = rest
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the random order of the next epoch; the same number on every rank."""
        self.epoch = epoch

    @abstractmethod
    def dealt(self) -> Iterator[Dealt]:
        """The steps of an epoch with all that is known of them, for `predict`."""

    def __iter__(self) -> Iterator[Any]:
        rank, world = rank_and_world()
        everything = torch.ones(self.batch_size, dtype=torch.bool)
        for batch, real, _ in self.dealt():
            if self.rest != "pad":
                yield batch
                continue
            first, end = share(real, rank, world)
            mask = everything.clone()  # a tenth of the time of a new one with a part of it set
            if end - first < self.batch_size:
                mask[end - first :] = False
            yield batch, mask


class MapShard(Shard):
    """Of a dataset with a length: every rank reads its own samples only."""

    def __init__(
        self,
        loader: DataLoader[Any],
        rest: Rest,
        seed: int,
        groups: Sequence[int] | None,
    ) -> None:
        super().__init__(loader, rest)
        dataset: Any = loader.dataset
        self.size = len(dataset)
        self._order = Order(loader.sampler, self.size, seed)
        self._groups = None if groups is None else torch.as_tensor(groups)
        if self._groups is not None and self._groups.shape != (self.size,):
            raise ValueError(
                f"shard: groups has the shape {list(self._groups.shape)}, and the dataset "
                f"{self.size} samples: it needs one number for each"
            )
        self._complete: int | None = None
        self._batches = _Batches()
        kept = {name: getattr(loader, name) for name in KEPT}
        self._loader = DataLoader(
            loader.dataset, batch_sampler=self._batches, collate_fn=loader.collate_fn, **kept
        )

    @property
    def is_in_order(self) -> bool:
        """Whether the samples come in the order of the dataset (within a group)."""
        return self._order.is_sequential

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._order.set_epoch(epoch)

    def deal(self, world: int) -> Deal:
        """The steps of this epoch; positions are indices of the dataset."""
        order = self._order.draw()
        groups = None if self._groups is None else self._groups[order]
        shuffle = None if self.is_in_order else self._order.generator()
        dealt = deal(len(order), self.batch_size, world, self.rest, groups=groups, shuffle=shuffle)
        return Deal(order[dealt.positions], dealt.steps, self.batch_size, world)

    def __len__(self) -> int:
        """Steps of an epoch: the same on every rank."""
        return len(self.deal(rank_and_world()[1]).steps)

    def __repr__(self) -> str:
        world = rank_and_world()[1]
        steps = self.deal(world).steps
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        places = len(steps) * self.batch_size * world
        filled = places - sum(end - first for first, end in steps)
        return (
            f"{self.size} samples in {len(steps)} steps of {self.batch_size} on {ranks}, "
            f"rest={self.rest!r}" + (f": {filled} of {places} places are filled up" * bool(filled))
        )

    def dealt(self) -> Iterator[Dealt]:
        rank, world = rank_and_world()
        if self._complete == self.epoch and not self.is_in_order:
            warnings.warn(
                f"shard: this is the order of epoch {self.epoch} once more: call "
                "set_epoch(epoch) before each epoch",
                stacklevel=3,
            )
        dealt = self.deal(world)
        self._batches.chosen = dealt, rank
        for step, batch in enumerate(self._loader):
            yield Dealt(batch, dealt.count(step), dealt.of_step(step))
        self._complete = self.epoch


class StreamShard(Shard):
    """Of an IterableDataset: every rank reads all of it, and collates its own part."""

    def __init__(self, loader: DataLoader[Any], rest: Rest) -> None:
        super().__init__(loader, rest)
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

    def dealt(self) -> Iterator[Dealt]:
        stream = RankStream(
            self.dataset, self.batch_size, self.rest, self._collate, *rank_and_world()
        )
        kept = {name: getattr(self._given, name) for name in KEPT}
        kept["persistent_workers"] = False  # it is a new stream in each epoch
        for batch, count in DataLoader(stream, batch_size=None, collate_fn=_as_it_is, **kept):
            yield Dealt(batch, count, None)


class _Batches(BatchSampler):
    """The indices of this rank's batches of one epoch, which is chosen before it begins."""

    def __init__(self) -> None:
        self.chosen: tuple[Deal, int] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        assert self.chosen is not None
        dealt, rank = self.chosen  # those of now, also when another epoch has begun
        return (dealt.of_rank(step, rank).tolist() for step in range(len(dealt.steps)))


def _loader(data: Any, batch_size: int | None, shuffle: bool) -> DataLoader[Any]:
    if isinstance(data, tuple):
        raise TypeError("shard: a tuple is no dataset: TensorDataset(x, y) is one of tensors")
    is_stream = isinstance(data, IterableDataset)
    if not is_stream and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(
            f"shard takes a dataset with __len__ and __getitem__, an IterableDataset, or a "
            f"DataLoader of one, not {type(data).__name__}. Loaders that move batches to a "
            "device go around it: MpDeviceLoader(shard(loader), device)"
        )
    if batch_size is None:
        raise TypeError("shard: how many samples has a batch of one rank? shard(dataset, 64)")
    if shuffle and is_stream:
        raise ValueError("shard: an IterableDataset has its own order: it cannot be shuffled here")
    if shuffle and len(data) == 0:
        shuffle = False  # RandomSampler refuses what is empty
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


def _check(loader: DataLoader[Any]) -> None:
    if loader.batch_size is None:
        raise ValueError(
            "shard: this DataLoader has a batch_sampler of its own, or makes no batches: shard "
            "must choose them. Give it a DataLoader with a batch_size (and `groups` where a "
            "batch may have samples of one kind only)"
        )


def _as_it_is(batch: Any) -> Any:
    return batch
