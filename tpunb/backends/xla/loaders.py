"""Changes to data loaders: errors of data sets reach the loop, and waits for batches are counted.

Also replaces the loader inside torch_xla's own. torch_xla 2.8 and 2.9 read the data set in a thread
of `ParallelLoader`. If the data set raises there, the loop just ends: the training continues with
part of its data and counts as a success, or its ranks leave the loop at different steps and wait
for each other (measured). Errors on the way to the device are reported through a queue that the
loop checks at its end; `report_errors` makes the reading thread use this queue, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from queue import Queue
from typing import Any

from tpunb.backends import loader_waits


def report_errors() -> None:
    """Raise errors of data sets in the loop, for the rest of this process."""
    from torch_xla.distributed.parallel_loader import ParallelLoader

    worker: Any = ParallelLoader._loader_worker
    if getattr(worker, "reports_errors", False):
        return

    def reporting_worker(self: Any) -> None:
        self._cpu_loader = _ErrorQueueLoader(self._cpu_loader, self._exception_queue)
        worker(self)

    reporting_worker.reports_errors = True  # type: ignore[attr-defined]
    ParallelLoader._loader_worker = reporting_worker  # type: ignore[method-assign]


def count_waits() -> None:
    """Count in the heartbeat how long loops wait for MpDeviceLoader, for the rest of this process.

    `next_item` is timed and not `__next__`, which also ends the step before, with
    `torch_xla.sync()`, which may compile.
    """
    from torch_xla.distributed.parallel_loader import ParallelLoader

    loader_waits.count_waits_in(ParallelLoader, "next_item")


class _ErrorQueueLoader:
    """A loader that puts an error in a queue and ends, instead of raising it."""

    def __init__(self, loader: Any, errors: Queue[Exception]) -> None:
        self._loader = loader
        self._errors = errors

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        # Before the thread closes the queue of batches: the loop checks for an error after that.
        try:
            yield from self._loader
        except Exception as error:
            self._errors.put(error)


def inner_loader(loader: Any) -> Any:
    """The loader inside an MpDeviceLoader, which moves its batches to the device; else None."""
    module: Any = sys.modules.get("torch_xla.distributed.parallel_loader")
    if module is None or not isinstance(loader, module.MpDeviceLoader):
        return None
    return loader._loader


def with_inner_loader(device_loader: Any, loader: Any) -> Any:
    """A copy of an MpDeviceLoader with another loader inside."""
    twin = copy.copy(device_loader)
    twin._loader, twin._parallel_loader = loader, None
    return twin
