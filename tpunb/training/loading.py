"""`check_loader`: does the step wait for data, and what would help? Measured, not guessed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from tpunb.training import device_loaders
from tpunb.training.checkpoint_device import runtime
from tpunb.training.sharding import KEPT

ENOUGH = 0.05
"""The share of its time that a loop may wait for data."""
_WARM = 3
"""Steps that are not measured: they compile, and workers start."""
_PREFETCH = (2, 4)
_KEEP = (
    ": the processors cannot read and prepare data faster. Keep it ready "
    "(tpunb.training.FileCache, smaller images, fewer transforms)"
)


@dataclass(frozen=True)
class Loading:
    """A way to load, measured."""

    workers: int
    prefetch: int | None
    """Batches that each worker reads ahead."""
    seconds: float
    """From batch to batch, without any step."""


@dataclass(frozen=True)
class LoaderCheck:
    """What `check_loader` found. Shows itself in words."""

    step: float
    """Seconds of a step whose batch is there already."""
    loop: float
    """Seconds of a step of the loop as it is."""
    tried: tuple[Loading, ...]
    """Numbers of workers, the fewest first; none if the loader cannot be made again."""
    helps: Loading | None
    """The fewest workers that are fast enough, or else the fastest; None if nothing need change."""
    better: float | None
    """Seconds of a step of the loop with them."""

    @property
    def waits(self) -> float:
        """The share of its time that the loop waits for data."""
        return max(0.0, 1 - self.step / self.loop)

    def __repr__(self) -> str:
        told = (
            f"a step takes {self.step * 1e3:.1f} ms, in the loop {self.loop * 1e3:.1f} ms: it "
            f"waits for data {self.waits:.0%} of the time"
        )
        for one in self.tried:
            told += f"\n  {one.workers} workers: a batch every {one.seconds * 1e3:.1f} ms"
        if self.waits <= ENOUGH:
            return f"{told}\nThe loader is fast enough"
        if self.helps is None or self.better is None:
            return f"{told}\nIt is not a DataLoader: other numbers of workers were not tried"
        best = self.helps
        if self.better > self.loop * (1 - ENOUGH):
            return f"{told}\nOther numbers of workers are no faster{_KEEP}"
        options = f"num_workers={best.workers}"
        if best.prefetch is not None:
            options += f", prefetch_factor={best.prefetch}"
        told += f"\nDataLoader(…, {options}): a step every {self.better * 1e3:.1f} ms"
        return f"{told}. It still waits{_KEEP}" if best.seconds > self.step else told


def check_loader(
    loader: Iterable[Any], step: Callable[[Any], object], *, batches: int = 20
) -> LoaderCheck:
    """Measure a loop over `loader` that calls `step(batch)`, and other numbers of workers.

    `loader`: a DataLoader, alone or in torch_xla's MpDeviceLoader; others are measured as they
    are. `step`: one step of the training; it really is one. `batches`: how many are timed, each
    time. In a run call it in all ranks, which share the processors: each makes equally many
    steps. It takes as long as 4 times that many steps, and reading 5 times that many batches.
    """
    held = next(iter(loader))
    alone = _timed([held] * (batches + _WARM), step)
    loop = _timed(_endless(loader, batches + _WARM), step)
    inside = device_loaders.inner(loader)
    inner = loader if inside is None else inside
    if not isinstance(inner, DataLoader):
        return LoaderCheck(alone, loop, (), None, None)

    def seconds(workers: int) -> float:
        return _timed(_endless(_with(inner, workers, None), batches + _WARM), _nothing)

    tried = tuple(Loading(workers, None, seconds(workers)) for workers in _counts())
    # Without workers, and without a thread that reads ahead, a batch is read between two steps.
    beside = inside is not None
    fast = [
        one
        for one in tried
        if one.seconds <= alone * (1 - ENOUGH if one.workers or beside else ENOUGH)
    ]
    best = fast[0] if fast else min(tried, key=lambda one: one.seconds)
    # Both in all ranks, whatever this one has found: their steps are collectives.
    loops = {
        prefetch: _timed(
            _endless(_in(loader, _with(inner, best.workers, prefetch)), batches + _WARM), step
        )
        for prefetch in _PREFETCH
    }
    fewest = min(loops.values()) * (1 + ENOUGH)
    prefetch = next(number for number in _PREFETCH if loops[number] <= fewest)
    helps = Loading(best.workers, prefetch if best.workers else None, best.seconds)
    return LoaderCheck(alone, loop, tried, helps, loops[prefetch])


def _counts() -> list[int]:
    """0, 1, 2, 4, … up to what this rank has of the processors."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    most = max(1, len(os.sched_getaffinity(0)) // ranks)
    return [0, *(2**power for power in range(8) if 2**power <= most)]


def _timed(batches: Iterable[Any], step: Callable[[Any], object]) -> float:
    """Seconds from step to step, without the first few."""
    count, start = 0, 0.0
    for batch in batches:
        step(batch)
        if (xla := runtime()) is not None:
            xla.sync()  # a loader to the device does it; what is held here comes from none
        count += 1
        if count == _WARM:
            _wait()
            start = time.perf_counter()
    _wait()
    return (time.perf_counter() - start) / (count - _WARM)


def _wait() -> None:
    if runtime() is not None:
        xm: Any = sys.modules["torch_xla.core.xla_model"]
        xm.wait_device_ops()


def _nothing(batch: Any) -> None:
    pass


def _endless(loader: Iterable[Any], count: int) -> Iterator[Any]:
    """So many batches, of as many epochs as that takes."""

    def epochs() -> Iterator[Any]:
        while True:
            yield from loader

    return islice(epochs(), count)


def _with(loader: DataLoader[Any], workers: int, prefetch: int | None) -> DataLoader[Any]:
    """The same loader with other workers, which stay for all epochs."""
    kept = {name: getattr(loader, name) for name in KEPT if name != "pin_memory_device"}
    kept |= {"num_workers": workers, "persistent_workers": workers > 0}
    kept["prefetch_factor"] = prefetch if workers else None
    if isinstance(loader.dataset, IterableDataset):
        kept |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        kept |= {"batch_size": None, "sampler": loader.sampler}
    else:
        kept["batch_sampler"] = loader.batch_sampler
    if not workers:
        kept["multiprocessing_context"], kept["timeout"] = None, 0
    return DataLoader(loader.dataset, collate_fn=loader.collate_fn, **kept)


def _in(given: Any, loader: DataLoader[Any]) -> Any:
    """A loader to the device around another DataLoader, if the given one is one."""
    if device_loaders.inner(given) is None:
        return loader
    return device_loaders.around(given, loader)
