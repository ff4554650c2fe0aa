"""Resume a training: `TrainingState`, the `Position` in the data, random number generators."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tpunb.backends.xla import loaders
from tpunb.backends.xla.runtime import running_module
from tpunb.backends.xla.tensors import start_pending_work
from tpunb.training.checkpoint import api
from tpunb.training.checkpoint.sharded import has_dtensors
from tpunb.training.collectives import accelerator
from tpunb.training.ranks import is_first


class TrainingState:
    """All state of a training (model, optimizer, position in the data, …) as one checkpoint.

        batches = Position(loader)
        state = TrainingState(model=model, optimizer=optimizer, batches=batches, best=best)
        step = state.load()            # 0, or the step after the saved one
        for epoch in range(batches.epoch, epochs):
            for x, y in batches:
                ...
                state.save(step)
                step += 1

    A part is a dict of data, or an object with `state_dict` and `load_state_dict`. Rank 0 writes
    the parts for all ranks; each rank writes the state of its random number generators and the
    buffers of its modules (BatchNorm's means), and its own of parts that have DTensors
    (`fully_shard`). `own` names other parts that differ from rank to rank, such as those of
    torch_xla's FSDP or ZeRO, which each rank writes as well.

    On CPU and with the same number of ranks, a resumed training gets the same weights, bit for
    bit, as one that was not stopped.
    """

    def __init__(
        self, *, own: Collection[str] = (), path: str | Path | None = None, **parts: Any
    ) -> None:
        """`path`: where to save and load, as in `tpunb.save` and `tpunb.load`.

        Raises TypeError for a part that is neither a dict nor has `load_state_dict`, ValueError
        if `own` names something that is not a part.
        """
        for name, part in parts.items():
            if not isinstance(part, dict) and not hasattr(part, "load_state_dict"):
                raise TypeError(
                    f"TrainingState: {name} is a {type(part).__name__}, which has no "
                    "load_state_dict: pass it in a dict, or leave it out"
                )
        if unknown := set(own) - set(parts):
            raise ValueError(f"TrainingState: own={sorted(unknown)} are not among its parts")
        self._parts = parts
        positions = {name for name, part in parts.items() if isinstance(part, Position)}
        self._own = positions.union(own)
        self._path = path

    def save(self, step: int) -> None:
        """Write a checkpoint, as `tpunb.save` does. Call it on all ranks, between two steps.

        Raises CheckpointError if it cannot be written.
        """
        start_pending_work()
        states: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        for name, part in self._parts.items():
            own = dict(part) if isinstance(part, dict) else part.state_dict()
            if is_first() or name in self._own or has_dtensors(own):
                states[name] = own
            elif isinstance(part, nn.Module):
                names = {key for key, _ in part.named_buffers()}
                buffers[name] = {k: v for k, v in own.items() if k in names}
        seed = device_seed()
        host = host_random_state()
        state = {"parts": states, "buffers": buffers, "random": host, "seed": seed}
        api.save(state, step, per_rank=True, path=self._path)
        self._seed(seed)

    def load(
        self,
        path: str | Path | None = None,
        *,
        step: int | None = None,
        weights_only: bool = True,
    ) -> int:
        """Load the newest checkpoint into the parts; return the step after it, 0 if there is none.

        Call it on all ranks, directly above the loop: random numbers drawn between this call and
        the loop would change the training. The arguments are those of `tpunb.load`.

        Raises CheckpointError as `tpunb.load` does, also if a different number of ranks saved it.
        """
        path = path or self._path
        own = api.load(path, step=step, weights_only=weights_only)
        if own is None:
            return 0
        shared = own
        if not is_first():
            of_rank_0 = api.load(path, step=own.step, rank=0, weights_only=weights_only)
            assert of_rank_0 is not None  # for a step that does not exist it raises
            shared = of_rank_0
        for name, part in self._parts.items():
            source = own if name in own["parts"] else shared
            if isinstance(part, dict):
                part.clear()
                part.update(source["parts"][name])
            else:
                part.load_state_dict(source["parts"][name])
            if name in own["buffers"]:
                part.load_state_dict(own["buffers"][name], strict=False)
        set_host_random_state(own["random"])
        self._seed(own["seed"])
        return own.step + 1

    def _seed(self, seed: Seed) -> None:
        """Seed the device in the same way whether the training was resumed or not stopped."""
        set_device_seed(seed)
        for part in self._parts.values():
            if isinstance(part, Position):
                part.seed_next(seed)


class Position:
    """A loader that counts its batches and can resume in the middle of an epoch.

        batches = Position(loader)
        for epoch in range(batches.epoch, epochs):
            for x, y in batches:
                ...

    It yields the loader's batches and has a `state_dict()`. After `load_state_dict`, the next loop
    resumes in the same epoch, in the same order, after the last batch that the training got. The
    order follows from the state of the random generators at the beginning of the epoch.
    `set_epoch` of samplers and loaders is called.

    A DataLoader does not read the skipped batches again, even inside torch_xla's MpDeviceLoader
    (put Position around that, because it reads ahead). Other loaders read them and drop them, and
    with `replay` all loaders do: then the random numbers of workers are the same too, unless the
    workers are persistent.
    """

    def __init__(self, loader: Iterable[Any], *, replay: bool = False) -> None:
        """`loader`: a DataLoader, or any iterable that yields one epoch per iteration."""
        self.epoch = 0
        """The epoch of the current loop; between loops, that of the next one."""
        self.batch = 0
        """The number of batches of this epoch that the loop got."""
        self._chain = _chain(loader)
        generators = [getattr(part, "generator", None) for part in self._chain]
        self._order = _Order([each for each in generators if isinstance(each, torch.Generator)])
        self._loader = _with_order(loader, self._order)
        self._skips = self._order.sampler is not None and not replay
        self._resumed = False
        self._began: dict[str, Any] = {}
        self._seed: Seed = None

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, False
        if self.batch and not resumed:  # the last loop was left by `break`
            self.epoch, self.batch = self.epoch + 1, 0
        for part in self._chain:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        now = host_random_state()
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
            set_host_random_state(now)
        yield from map(self._begin, batches)  # a variable here would keep the batch alive
        self.epoch, self.batch = self.epoch + 1, 0

    def _begin(self, batch: Any) -> Any:
        self.batch += 1
        seed, self._seed = self._seed, None
        set_device_seed(seed)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop got."""
        began = self._began if self.batch else {}
        return {"epoch": self.epoch, "batch": self.batch, "began": began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next loop begin after the last batch of a `state_dict()`."""
        self.epoch, self.batch, self._began = state["epoch"], state["batch"], state["began"]
        self._resumed = True

    def seed_next(self, seed: Seed) -> None:
        """Seed the device with `seed` just before the next batch is yielded."""
        self._seed = seed


class _Order:
    """A DataLoader's sampler that skips the beginning of its order."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.sampler: Any = None
        self.generators = generators
        self.began: Mapping[str, Any] = {}
        """The states at the beginning of the epoch of all generators that the order depends on."""
        self.skip = 0
        self.then: Mapping[str, Any] = {}
        """The states of the global generators to set after the skipped part."""

    def put_generators(self) -> None:
        """Set all generators to their states at the beginning of the epoch."""
        set_host_random_state(self.began["host"])
        for generator, state in zip(self.generators, self.began["generators"], strict=True):
            generator.set_state(state)

    def __iter__(self) -> Iterator[Any]:
        # Again, because the loader may have drawn a seed for its workers (not if they persist).
        self.put_generators()
        order = iter(self.sampler)
        if self.skip:
            for _ in islice(order, self.skip):
                pass
            set_host_random_state(self.then)
        yield from order

    def __len__(self) -> int:
        return len(self.sampler)


def _with_order(loader: Any, order: _Order) -> Any:
    """Return a copy of a DataLoader with `order` as its sampler; other loaders unchanged."""
    if (inside := loaders.inner_loader(loader)) is not None:
        return loaders.with_inner_loader(loader, _with_order(inside, order))
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    order.sampler = getattr(loader, name)
    twin = copy.copy(loader)
    vars(twin)[name] = order  # DataLoader refuses a plain assignment
    return twin


def _chain(loader: Any) -> list[Any]:
    """Return the loader, the loaders inside it, and their samplers, each once."""
    chain: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is each for each in chain):
            continue
        chain.append(part)
        samplers = [getattr(part, "batch_sampler", None), getattr(part, "sampler", None)]
        waiting += [loaders.inner_loader(part), *samplers]
    return chain


def host_random_state() -> dict[str, Any]:
    """Return the states of the global generators of torch, Python and, if loaded, numpy."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def set_host_random_state(states: Mapping[str, Any]) -> None:
    """Restore states that `host_random_state` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])


Seed = int | torch.Tensor | None
"""The state of a device's random generator: XLA's seed, or the state of an accelerator's."""


def device_seed() -> Seed:
    """Return the state of the device's random generator; None if no device is in use.

    torch_xla makes a new seed at each `torch_xla.sync()`, even if nothing is pending, so the seed
    depends on how often loaders and checkpoints have called that.
    """
    xla = running_module()
    if xla is not None:
        return int(xla.core.xla_model.get_rng_state())
    module = _accelerator()
    state: Seed = None if module is None else module.get_rng_state().cpu()
    return state


def set_device_seed(seed: Seed) -> None:
    """Restore what `device_seed` returned. A state of another kind of device is left out."""
    xla, module = running_module(), _accelerator()
    if xla is not None and isinstance(seed, int):
        xla.core.xla_model.set_rng_state(seed)
    elif module is not None and isinstance(seed, torch.Tensor):
        module.set_rng_state(seed)


def _accelerator() -> Any:
    """The module of this process's accelerator, such as torch.tpu; None if it is not in use."""
    device = accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    return module if module is not None and module.is_initialized() else None
