"""Counts in the heartbeat how long loops wait for the batches of torch's DataLoader.

Any other iterable may be the training itself, written as a generator.
"""

from __future__ import annotations

from typing import Any

from tpunb.runs import heartbeat


def count_waits() -> None:
    """Count the waits, for the rest of this process."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    count_waits_in(_BaseDataLoaderIter, "__next__")


def count_waits_in(batches: Any, method: str) -> None:
    """Count the waits in the method of an iterator's class that returns the next batch."""
    following = getattr(batches, method)
    if getattr(following, "counts_waits", False):
        return

    def counting(*args: Any) -> Any:
        return heartbeat.timed_read(lambda: following(*args))

    counting.counts_waits = True  # type: ignore[attr-defined]
    setattr(batches, method, counting)
