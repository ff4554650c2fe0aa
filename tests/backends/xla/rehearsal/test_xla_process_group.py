"""torch.distributed on XLA devices, in rehearsal ranks."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.drivers.lazy import torch_xla, xm
from tests.drivers.ranks import Ranks, rehearse
from tpunb.backends.rehearsal.errors import CollectiveError

# Functions without `test_` run in ranks; each is followed by the test that calls it.


def free_port() -> int:
    """One that nobody has, below those that sockets get by themselves (from 32768 on)."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def meetings(free: int) -> list[Any]:
    rank, world = rehearse()
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
    found = ranks.values(meetings, 2, free_port())
    backends = ["xla"] * 3 + ["gloo"] * 2 + ["xla"] * 2 + ["gloo"] * 2 + ["xla"]
    assert found == [[[backend, 3.0] for backend in backends]] * 2


def meets_nobody(way: str) -> str:
    rank, _ = rehearse()
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
def test_mismatch_names_a_rank_missing_in_init_process_group(ranks: Ranks, way: str) -> None:
    for message in ranks.values(meets_nobody, 2, way):
        assert "rank 0: init_process_group, " in message
        assert "test_xla_process_group.py: dist.init_process_group(" in message
        assert "rank 1: all_reduce sum of float32[3]" in message


def launched() -> list[float]:
    rank, _ = rehearse()
    from torch_xla._internal import pjrt

    from tpunb.backends import launchers

    launchers.redirect_launchers(rank)
    found = []

    def train(index: int, method: str) -> float:
        dist.init_process_group("xla", init_method=method)
        value = torch.tensor([index + 1.0], device=torch_xla.device())
        dist.all_reduce(value)
        found.append(value.item())
        return value.item()

    torch_xla.launch(train, args=("xla://",))
    torch_xla.launch(train, args=("env://",))
    found += pjrt.run_multiprocess(train, rank, "xla://").values()
    dist.init_process_group("gloo")  # not the launcher's to end
    torch_xla.launch(found.append)
    assert dist.is_initialized()
    dist.barrier()  # a rank that ends at once closes what the other has not opened yet
    return found


def test_a_process_group_ends_with_its_launch(ranks: Ranks) -> None:
    assert ranks.values(launched, 2) == [[3.0, 3.0, 3.0, 3.0, rank] for rank in range(2)]


def every_collective() -> dict[str, Any]:
    rank, world = rehearse()
    dist.init_process_group("xla", init_method="xla://")
    device = torch_xla.device()

    def own(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor filled with the rank's number plus one."""
        return torch.full(shape, rank + 1, dtype=dtype, device=device)

    found: dict[str, Any] = {}
    for operation in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR"):
        value = own(2, dtype=torch.int64)
        dist.all_reduce(value, op=getattr(dist.ReduceOp, operation))
        found[operation] = value.tolist()
    value = own(2, dtype=torch.bfloat16)
    work = dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True)
    found["async"] = [work.wait() and work.is_completed(), value.tolist(), str(value.dtype)]

    value = own(2)
    dist.reduce(value, 1)
    found["reduce"] = value.tolist()
    value = own(2)
    dist.broadcast(value, src=world - 1)
    found["broadcast"] = value.tolist()
    parts = [own(1) for _ in range(world)]
    dist.all_gather(parts, own(1))
    found["all_gather"] = [part.item() for part in parts]
    whole = torch.zeros(world, 2, device=device)
    dist.all_gather_into_tensor(whole, own(2))
    found["all_gather_into_tensor"] = whole.tolist()
    parts = [own(1) for _ in range(world)] if rank == 2 else None
    dist.gather(own(1), parts, dst=2)
    found["gather"] = parts and [part.item() for part in parts]

    rows = torch.arange(world * 2.0, device=device).reshape(world, 2) * (rank + 1)
    value = torch.zeros(2, device=device)
    dist.reduce_scatter_tensor(value, rows.reshape(-1))
    found["reduce_scatter_tensor"] = value.tolist()
    value = torch.zeros(2, device=device)
    dist.reduce_scatter(value, list(rows))
    found["reduce_scatter"] = value.tolist()
    value = torch.zeros(2, device=device)
    dist.scatter(value, list(rows) if rank == 3 else None, src=3)
    found["scatter"] = value.tolist()
    column = torch.zeros(world, device=device)
    dist.all_to_all_single(column, torch.arange(world, device=device) + 10.0 * rank)
    found["all_to_all_single"] = column.tolist()
    parts = [torch.zeros(2, device=device) for _ in range(world)]
    dist.all_to_all(parts, list(rows))
    found["all_to_all"] = [part.tolist() for part in parts]

    value = own(2) if rank in (0, 2) else None
    if rank == 0:
        dist.send(value, 2)
    elif rank == 2:
        dist.recv(value, 0)
        found["recv"] = value.tolist()
    if rank == 1:
        dist.isend(own(2), 3).wait()
    elif rank == 3:
        value = own(2)
        dist.irecv(value, 1).wait()
        found["recv"] = value.tolist()

    objects = [rank, "text"] if rank == 1 else [None, None]
    dist.broadcast_object_list(objects, src=1, device=device)
    found["broadcast_object_list"] = objects
    dist.barrier()
    return found


def test_process_group_collectives(ranks: Ranks) -> None:
    found = ranks.values(every_collective, 4)
    rows = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    for rank, own in enumerate(found):
        assert own == {
            "SUM": [10, 10],
            "PRODUCT": [24, 24],
            "MIN": [1, 1],
            "MAX": [4, 4],
            "BAND": [0, 0],
            "BOR": [7, 7],
            "async": [True, [4.0, 4.0], "torch.bfloat16"],
            "reduce": [10.0, 10.0] if rank == 1 else [rank + 1.0] * 2,
            "broadcast": [4.0, 4.0],
            "all_gather": [1.0, 2.0, 3.0, 4.0],
            "all_gather_into_tensor": [[r + 1.0] * 2 for r in range(4)],
            "gather": [1.0, 2.0, 3.0, 4.0] if rank == 2 else None,
            "reduce_scatter_tensor": [10 * value for value in rows[rank]],
            "reduce_scatter": [10 * value for value in rows[rank]],
            "scatter": [4 * value for value in rows[rank]],
            "all_to_all_single": [rank + 10.0 * r for r in range(4)],
            "all_to_all": [[(r + 1) * value for value in rows[rank]] for r in range(4)],
            **({"recv": [rank - 1.0] * 2} if rank in (2, 3) else {}),
            "broadcast_object_list": [1, "text"],
        }


def sub_groups() -> list[Any]:
    rank, world = rehearse()
    dist.init_process_group("xla", init_method="xla://")
    device = torch_xla.device()
    # torch_xla turns the first into [[0, 1], [2, 3]], and the second into [[0, 2], [1, 3]].
    options = {"xla_pg_options": {"spmd": True}}
    halves = [dist.new_group(ranks, pg_options=options) for ranks in ([0, 1], [2, 3])]
    crossed = [dist.new_group(ranks, pg_options=options) for ranks in ([0, 2], [1, 3])]
    found: list[Any] = []
    for group in (halves[rank // 2], crossed[rank % 2], dist.new_group(list(range(world)))):
        value = torch.tensor([rank + 10.0], device=device)
        dist.all_reduce(value, group=group)
        found.append(value.item())
        parts = [torch.zeros(1, device=device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, torch.tensor([rank + 10.0], device=device), group=group)
        found.append([part.item() for part in parts])
    own = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    with pytest.raises(ValueError, match="groups") as refused:
        dist.all_reduce(torch.tensor([rank + 10.0], device=device), group=own)
    found.append(str(refused.value))
    return found


def test_process_group_sub_groups(ranks: Ranks) -> None:
    found = ranks.values(sub_groups, 4)
    everybody = [46.0, [10.0, 11.0, 12.0, 13.0]]
    even, odd = [22.0, [10.0, 12.0]], [24.0, [11.0, 13.0]]
    low, high = [21.0, [10.0, 11.0]], [25.0, [12.0, 13.0]]
    assert [own[:-1] for own in found] == [
        [*half, *crossed, *everybody] for half in (low, high) for crossed in (even, odd)
    ]
    for own in found:
        assert "pg_options={'xla_pg_options': {'spmd': True}}" in own[-1]


def keep_gloo() -> None:
    """Keep the gloo groups that torch makes.

    Of "cpu:gloo,xla:xla" it drops gloo's as soon as it has xla's, which closes connections that
    another rank is still opening: without a rehearsal too (11 of 187 rounds on busy processors).
    """
    from torch.distributed import distributed_c10d

    kept: list[Any] = []

    class Kept(distributed_c10d.ProcessGroupGloo):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            kept.append(self)

    distributed_c10d.ProcessGroupGloo = Kept


def beside(backend: str) -> list[Any]:
    rank, world = rehearse()
    keep_gloo()

    dist.init_process_group(backend)
    gloo = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
    cpu = torch.tensor([rank + 1.0])
    dist.all_reduce(cpu, group=gloo)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=gloo)
    xla = xm.all_reduce("sum", torch.tensor([rank + 1.0], device=torch_xla.device()))
    xm.rendezvous("beside")
    return [cpu.item(), objects, xla.item()]


@pytest.mark.parametrize("backend", ["gloo", "xla", "cpu:gloo,xla:xla"])
def test_a_gloo_group_of_the_user_beside_ours(ranks: Ranks, backend: str) -> None:
    objects = [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]
    assert ranks.values(beside, 2, backend) == [[3.0, objects, 3.0]] * 2


def on_the_cpu(backend: str) -> list[str]:
    rehearse()
    keep_gloo()

    dist.init_process_group(backend)
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1)),
        lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2)),
        lambda: dist.all_gather_object([None, None], "text"),
        lambda: dist.broadcast_object_list(["text"]),
    ):
        with pytest.raises(RuntimeError, match=r"XLA tensor|vs\. xla") as refused:
            call()
        found.append(str(refused.value))
    xm.rendezvous("end")  # gloo's connections are made by both
    return found


@pytest.mark.parametrize("backend", ["xla", "cpu:gloo,xla:xla"])
def test_cpu_tensors_are_refused_as_on_a_tpu(ranks: Ranks, backend: str) -> None:
    for found in ranks.values(on_the_cpu, 2, backend):
        for message in found[:-1]:  # the last is torch_xla's own word
            assert message.startswith("Expected XLA tensor. Got: torch.")
            assert "dist.new_group(backend='gloo')" in message
