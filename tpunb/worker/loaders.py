"""Errors of data sets below torch_xla's loaders reach the loop that reads from them.

torch_xla 2.8 and 2.9 read the data set in a thread of `ParallelLoader`, and if it raises there,
the loop just ends: a training goes on with part of its data and is called a success, or its
ranks leave the loop at different steps and wait for each other (measured). What goes wrong on
the way to the device is told already, through a queue that the loop looks into at its end; here
the thread uses it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from typing import Any


def tell_of_errors() -> None:
    """For the rest of this process. The names that are used are in `xla_patches`."""
    from torch_xla.distributed.parallel_loader import ParallelLoader

    read: Any = ParallelLoader._loader_worker
    if getattr(read, "tells", False):
        return

    def reads_and_tells(self: Any) -> None:
        self._cpu_loader = _Telling(self._cpu_loader, self._exception_queue)
        read(self)

    reads_and_tells.tells = True  # type: ignore[attr-defined]
    ParallelLoader._loader_worker = reads_and_tells  # type: ignore[method-assign]


class _Telling:
    """A loader that ends where it would raise, and leaves the error in a queue."""

    def __init__(self, loader: Any, errors: Queue[Exception]) -> None:
        self._loader = loader
        self._errors = errors

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        # Before the thread closes the queue of batches: then the loop looks for an error.
        try:
            yield from self._loader
        except Exception as error:
            self._errors.put(error)
