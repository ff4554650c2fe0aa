"""Notes what this rank exchanges with others through torch.distributed's process groups.

All functions of `torch.distributed` end in methods of a ProcessGroup, however they were imported;
what C++ calls, as DistributedDataParallel does for gradients, is not seen.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpunb.backends.rehearsal.call import RankCall
from tpunb.backends.rehearsal.stats import collective_stats

PAIRWISE = ("send", "recv")
METHODS = re.compile("(send|recv|_?all|broadcast|gather|_?reduce|scatter).*")


def watch_exchanges() -> None:
    """Tell the watchers of collectives of each call, for the rest of this rank."""
    if torch.distributed.is_available():
        group: Any = torch.distributed.ProcessGroup
        for name in filter(METHODS.fullmatch, list(vars(group))):
            setattr(group, name, _watched(getattr(group, name), name))


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
