"""What a rank exchanges through process groups is noted, whatever function it calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tpunb.backends.rehearsal.stats import collective_stats
from tpunb.backends.torch import exchanges


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    for name in filter(exchanges.METHODS.fullmatch, list(vars(dist.ProcessGroup))):
        method = getattr(dist.ProcessGroup, name)
        monkeypatch.setattr(dist.ProcessGroup, name, method)  # restored at the end
    exchanges.watch_exchanges()
    found: list[str] = []
    monkeypatch.setattr(collective_stats, "watchers", [lambda call, _: found.append(str(call))])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # by torch 2.13
def test_each_exchange_is_noted(noted: list[str]) -> None:
    x, out = torch.ones(2, 3), torch.empty(2, 3)
    dist.all_reduce(x)
    assert noted == ["allreduce of torch.float32[2, 3]"]
    for exchange in (
        lambda: dist.all_gather([out], x),
        lambda: dist.all_gather_into_tensor(out, x),
        lambda: dist.all_to_all_single(out, x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.gather(x, [out]),
        lambda: dist.reduce(x, 0),
        lambda: dist.reduce_scatter_tensor(out, x),
        lambda: dist.scatter(out, [x]),
    ):
        noted.clear()
        exchange()
        assert len(noted) == 1
