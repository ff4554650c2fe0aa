"""Notes what this rank exchanges with others through torch.distributed's process groups.

All functions of `torch.distributed` end in these methods, however they were imported; what C++
calls, as DistributedDataParallel does for gradients, is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpunb.backends.rehearsal.call import RankCall
from tpunb.backends.rehearsal.stats import collective_stats

PAIRWISE = ("send", "recv")
METHODS = (
    *PAIRWISE,
    *("allgather", "allreduce", "alltoall", "broadcast", "gather", "reduce", "scatter"),
    *("reduce_scatter", "_allgather_base", "_reduce_scatter_base", "alltoall_base"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
"""Of ProcessGroup, without a promise (torch 2.8 to 2.15; the last three since 2.13)."""


def watch_exchanges() -> None:
    """Tell the watchers of collectives of each call, for the rest of this rank."""
    if torch.distributed.is_available():
        group: Any = torch.distributed.ProcessGroup
        for name in METHODS:
            if method := getattr(group, name, None):
                setattr(group, name, _watched(method, name))


def _watched(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(group: Any, *args: Any, **options: Any) -> Any:
        call = RankCall(name, tuple(f"{t.dtype}{list(t.shape)}" for t in _tensors(args)))
        for watcher in collective_stats.watchers:
            watcher(call, 0)
        return method(group, *args, **options)

    return watched


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
