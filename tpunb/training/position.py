"""`Position`: a loader that can go on where a training was stopped."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from tpunb.training import device_loaders, randomness


class Position:
    """A loader, and how far the training has come in it.

        batches = Position(loader)
        for epoch in range(batches.epoch, epochs):
            for x, y in batches:

    It is the same loader, with a `state_dict()`: after `load_state_dict`, the next loop goes on
    in the same epoch, in the same order, behind the batch that was the last. The order is found
    again by the state of the random generators at the beginning of the epoch. Samplers and
    loaders that have `set_epoch` are told the epoch.

    Of a DataLoader (also in torch_xla's MpDeviceLoader; put Position around that, because it
    reads ahead) the batches before that are not read. Others, and all with `replay`, are read
    again and dropped: with `replay` also what workers draw at random is as it was, unless they
    are persistent.
    """

    def __init__(self, loader: Iterable[Any], *, replay: bool = False) -> None:
        """`loader`: a DataLoader, or anything that can be iterated once for each epoch."""
        self.epoch = 0
        """The epoch of the current loop, or, behind it, of the next."""
        self.batch = 0
        """Batches of this epoch that the loop has got."""
        self._chain = _chain(loader)
        generators = [getattr(part, "generator", None) for part in self._chain]
        self._order = _Order([one for one in generators if isinstance(one, torch.Generator)])
        self._loader = _with_order(loader, self._order)
        self._skips = self._order.sampler is not None and not replay
        self._resumed = False
        self._began: dict[str, Any] = {}
        self._seed: int | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, False
        if self.batch and not resumed:  # the last loop was left by `break`
            self.epoch, self.batch = self.epoch + 1, 0
        for part in self._chain:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        now = randomness.on_host()
        if not self.batch:
            states = [generator.get_state() for generator in self._order.generators]
            self._began = {"host": now, "generators": states}
        order = self._order
        order.began, order.skip, order.then = self._began, self.batch if self._skips else 0, now
        order.put_generators()
        batches = iter(self._loader)
        if self.batch and not self._skips:
            for _ in islice(batches, self.batch):
                pass
            randomness.put_on_host(now)
        for batch in batches:
            self.batch += 1
            seed, self._seed = self._seed, None
            randomness.put_on_device(seed)
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the training is: behind the batch that the loop was given last."""
        began = self._began if self.batch else {}
        return {"epoch": self.epoch, "batch": self.batch, "began": began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin behind the last batch of a `state_dict()`."""
        self.epoch, self.batch, self._began = state["epoch"], state["batch"], state["began"]
        self._resumed = True

    def seed_next(self, seed: int | None) -> None:
        """Give the device this seed with the next batch, whatever the loader does before it."""
        self._seed = seed


class _Order:
    """The order of a DataLoader's sampler without its beginning."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.sampler: Any = None
        self.generators = generators
        self.began: Mapping[str, Any] = {}
        """The states of all generators with which the order is drawn."""
        self.skip = 0
        self.then: Mapping[str, Any] = {}
        """The states of the global ones behind what is skipped."""

    def put_generators(self) -> None:
        """Set all generators as they were when the epoch began."""
        randomness.put_on_host(self.began["host"])
        for generator, state in zip(self.generators, self.began["generators"], strict=True):
            generator.set_state(state)

    def __iter__(self) -> Iterator[Any]:
        # Again: the loader has drawn a seed for its workers or, where they persist, it has not.
        self.put_generators()
        order = iter(self.sampler)
        if self.skip:
            for _ in islice(order, self.skip):
                pass
            randomness.put_on_host(self.then)
        yield from order

    def __len__(self) -> int:
        return len(self.sampler)


def _with_order(loader: Any, order: _Order) -> Any:
    """The same loader, which asks `order` for what to read next; others as they are."""
    if (inside := device_loaders.inner(loader)) is not None:
        return device_loaders.around(loader, _with_order(inside, order))
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    order.sampler = getattr(loader, name)
    twin = copy.copy(loader)
    vars(twin)[name] = order  # to assign it is refused, because a loader may have begun
    return twin


def _chain(loader: Any) -> list[Any]:
    """The loader, what is in it, and its samplers: each once."""
    found: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is one for one in found):
            continue
        found.append(part)
        samplers = [getattr(part, "batch_sampler", None), getattr(part, "sampler", None)]
        waiting += [device_loaders.inner(part), *samplers]
    return found
