"""torch.distributed on XLA devices, in rehearsal ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.worker.ranks import Ranks, rehearse, warm


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with warm(tmp_path_factory.mktemp("ranks")) as started:
        yield started


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Functions without `test_` run in ranks; each is followed by the test that calls it.


def meetings(free: int) -> list[Any]:
    rank, world = rehearse()
    import torch
    import torch.distributed as dist
    import torch_xla

    found: list[Any] = []

    def summed(device: Any, **options: Any) -> None:
        dist.init_process_group(**options)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        value = torch.tensor([rank + 1.0], device=device)
        dist.all_reduce(value)
        found.append([dist.get_backend(), value.item()])
        dist.destroy_process_group()

    xla, cpu = torch_xla.device(), torch.device("cpu")
    agents = os.environ["MASTER_PORT"]
    for method in ("xla://", "env://", "xla://"):
        summed(xla, backend="xla", init_method=method)
    for _ in range(2):
        summed(cpu, backend="gloo")  # gloo keeps addresses in the store
    os.environ["MASTER_PORT"] = str(free)  # as scripts do that were started with xmp.spawn
    summed(xla, backend="xla", init_method="xla://")
    summed(xla, backend="xla", init_method="env://")
    summed(cpu, backend="gloo", init_method="env://")
    address = f"tcp://localhost:{free}"
    summed(cpu, backend="gloo", init_method=address, rank=rank, world_size=world)
    os.environ["MASTER_PORT"] = agents
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    summed(xla, backend="xla", init_method="env://")
    return found


def test_process_groups_meet_in_every_way_one_after_the_other(ranks: Ranks) -> None:
    found = ranks.values(meetings, 2, _free_port())
    backends = ["xla"] * 3 + ["gloo"] * 2 + ["xla"] * 2 + ["gloo"] * 2 + ["xla"]
    assert found == [[[backend, 3.0] for backend in backends]] * 2


def meets_nobody(way: str) -> str:
    rank, _ = rehearse(timeout=1.0)
    import torch
    import torch.distributed as dist
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.worker.rehearsal.gloo import CollectiveError

    if way == "env://":
        os.environ["MASTER_PORT"] = "1"  # nobody could serve it
    try:
        if rank == 0:
            dist.init_process_group("xla", init_method=way)
        else:
            xm.all_reduce("sum", torch.ones(3, device=torch_xla.device()))
    except CollectiveError as error:
        return str(error)
    raise AssertionError


@pytest.mark.parametrize("way", ["xla://", "env://"])
def test_a_rank_that_does_not_come_to_init_process_group_is_named(ranks: Ranks, way: str) -> None:
    for message in ranks.values(meets_nobody, 2, way):
        assert "rank 0: init_process_group, " in message
        assert "test_distributed.py: dist.init_process_group(" in message
        assert "rank 1: all_reduce sum of float32[3]" in message


def own_children() -> list[Any]:
    """A process of the user's own below a rank makes groups as it would without a rehearsal."""
    rank, _ = rehearse()
    import torch
    import torch.distributed as dist

    os.environ["MASTER_PORT"] = str(_free_port())
    parent_end, child_end = os.pipe()
    if os.fork() == 0:
        os.environ.update(RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo")
        value = torch.tensor([5.0 + rank])
        dist.all_reduce(value)
        os.write(child_end, str(value.item()).encode())
        os._exit(0)
    os.close(child_end)
    said = os.read(parent_end, 10).decode()
    return [said, os.wait()[1]]


def test_a_process_below_a_rank_has_groups_of_its_own(ranks: Ranks) -> None:
    assert ranks.values(own_children, 2) == [["5.0", 0], ["6.0", 0]]
