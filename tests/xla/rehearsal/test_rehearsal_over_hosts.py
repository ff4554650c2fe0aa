"""Ranks on two hosts: the same numbers and errors as on one host."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.ranks import LOOPBACK, Ranks, rehearse

STEPS = 4


def everything() -> dict[str, Any]:
    """The results of each kind of collective on this rank, and of a short training."""
    rank, world = rehearse()
    import torch
    import torch.distributed as dist
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    device = torch_xla.device()
    torch.manual_seed(rank)
    x, small = torch.randn(8, 6), torch.randn(5)
    big = torch.randn(world << 20)  # 4 MB a rank: more than is sent with the call
    half = torch.randn(7).to(torch.bfloat16)
    given = [t.to(device) for t in (x, small, big, half)]
    found: dict[str, Any] = {}

    def keep(name: str, *tensors: torch.Tensor) -> None:
        import hashlib

        flat = [t.cpu().flatten().view(torch.uint8) for t in tensors]
        found[name] = hashlib.sha256(torch.cat(flat).numpy().tobytes()).hexdigest()

    for operation in ("sum", "max", "min", "mul"):
        keep(operation, *(xm.all_reduce(operation, t) for t in given))
    keep("list", *xm.all_reduce("sum", [t.clone() for t in given], scale=0.25) or given)
    near, far = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    for name, groups in (("near", near), ("far", far)):
        keep(f"sum {name}", xm.all_reduce("sum", given[0], groups=groups))
        keep(f"gathered {name}", xm.all_gather(given[0], groups=groups))
    keep("gathered", xm.all_gather(given[0], dim=1), xm.all_gather(given[2]))
    for name, tensor in (("", given[0]), (" big", given[2])):
        keep(f"scattered{name}", xm.reduce_scatter("sum", tensor, 1.0, 0, world))
        keep(f"all to all{name}", xm.all_to_all(tensor, 0, 0, world))
        pairs = [[0, 2], [2, 1], [1, 3]]
        keep(f"permuted{name}", xm.collective_permute(tensor, pairs))
    found["met"] = xm.rendezvous("here", bytes([rank]) * (rank + 1) * 1000)
    found["mesh"] = xm.mesh_reduce("mean", rank, sum)
    found["local"] = xr.local_ordinal(), xr.local_process_count(), xr.world_size()

    dist.init_process_group("xla", init_method="xla://")
    total = given[1].clone()
    dist.all_reduce(total)
    sent = given[1].clone()
    dist.broadcast(sent, 3)
    keep("distributed", total, sent)
    cpu = dist.new_group(backend="gloo")
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, f"rank {rank}", group=cpu)
    found["objects"] = objects

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(model.to(device))
    found["ddp"] = train(ddp, rank, world)
    dist.destroy_process_group()
    return found


def train(model: Any, rank: int, world: int, *, step_with_xm: bool = False) -> Any:
    """The losses on the global batch, and the weights."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    torch.manual_seed(2)
    features, labels = torch.randn(16, 6), torch.arange(16) % 3
    device = torch_xla.device()
    x, y = features[rank::world].to(device), labels[rank::world].to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        xm.optimizer_step(optimizer) if step_with_xm else optimizer.step()
        mean = loss.detach()
        if world > 1:
            mean = xm.all_reduce("sum", mean, scale=1 / world)
        torch_xla.sync()
        losses.append(mean.item())
    return losses, torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).tolist()


def trained() -> Any:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        rehearse()
    import torch
    import torch_xla

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return train(model.to(torch_xla.device()), rank, world, step_with_xm=True)


def test_training_over_hosts_equals_one_host_and_one_process(ranks: Ranks) -> None:
    ((losses, weights),) = ranks.values(trained, 1)
    one = ranks.values(trained, 4)
    two = ranks.values(trained, 4, hosts=LOOPBACK)
    assert two == one
    assert losses[-1] < losses[0]
    assert two[3][0] == pytest.approx(losses, rel=1e-5)
    assert two[3][1] == pytest.approx(weights, rel=1e-5, abs=1e-6)


# No rank may wait for a name server: on these hosts a query takes 10 s.
LISTEN = """
import socket, sys
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked.bind(("", 53))
print("listens", flush=True)
while True:
    print(asked.recv(512), flush=True)
"""


# -- mistakes that would hang on a TPU


def wrong(mistake: str) -> str:
    """Make a mistake on rank 3, the second on the second host; return the error of this rank."""
    from tpunb.xla.rehearsal import errors, install

    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.ones(4, device=torch_xla.device())
    xm.all_reduce("sum", [x])
    try:
        if mistake == "other call" and rank == 3:
            xm.all_gather(x)
        elif mistake == "other shape" and rank == 3:
            xm.all_reduce("sum", x[:2])
        elif mistake == "other pairs":
            xm.collective_permute(x, [[0, 3]] if rank == 3 else [[0, 2]])
        elif mistake.startswith("one less") and rank == 3:
            install.leave_rehearsal()
            if mistake == "one less, still busy":  # the others look; no connection is closed
                time.sleep(3)
            if mistake == "one less, then gone":
                time.sleep(2)
                os._exit(0)
            return ""
        elif (mistake == "killed" and rank == 3) or (mistake == "host killed" and rank > 1):
            os.kill(os.getpid(), 9)
        else:
            if mistake == "one less, then gone" and rank == 0:  # it finds a closed connection
                time.sleep(3)
            xm.all_reduce("sum", x)
            xm.all_reduce("max", x)
    except errors.CollectiveError as error:
        if mistake == "one less, still busy" and error.__context__ is not None:
            return f"a traceback would show {error.__context__!r} as the reason"
        return f"{type(error).__name__}: {error}"
    return ""


WRONG = {
    "other call": "MismatchError: .*ranks 0/0, 0/1, 1/2: all_reduce sum of float32.4..*"
    "rank 1/3: all_gather of float32.4.",
    "other shape": "MismatchError: .*rank 1/3: all_reduce sum of float32.2.",
    "other pairs": "MismatchError: .*rank 1/3: collective_permute of float32.4., pairs .*0, 3",
    "one less": "PeerLostError: rank 1/3 has returned from the train cell while rank ./. waited "
    "in all_reduce sum of float32.4..*rank 1/3 took part in 1, the last at line",
    "one less, still busy": "PeerLostError: rank 1/3 has returned from the train cell while rank ",
    "one less, then gone": "PeerLostError: rank 1/3 has returned from the train cell while rank ",
    "killed": "PeerLostError: rank 1/3 ended while rank ./. waited in all_reduce sum",
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mismatch_and_lost_rank_errors_name_the_host(ranks: Ranks, mistake: str) -> None:
    every = ranks.run(wrong, 4, mistake, hosts=LOOPBACK)
    for rank, ended in enumerate(every):
        if rank == 3 and (mistake.startswith("one less") or mistake == "killed"):
            continue
        assert re.match(WRONG[mistake], ended.value, re.DOTALL), (rank, ended.value)


def test_lost_host_names_all_its_ranks(ranks: Ranks) -> None:
    first, second, *_ = ranks.run(wrong, 4, "host killed", hosts=LOOPBACK)
    # A rank may see that one of them has ended before it sees the other.
    lost = "(ranks 1/2, 1/3|rank 1/[23]) ended while rank 0/. waited in all_reduce sum"
    said = re.compile(f"PeerLostError: {lost}")
    assert said.match(first.value), first.value
    assert said.match(second.value), second.value


def without_store(folder: str) -> str:
    """Wait for rank 3, which ends the process that serves the store, and does not take part."""
    rank, world = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.xla.rehearsal.errors import PeerLostError

    x = torch.ones(4, device=torch_xla.device())
    xm.all_reduce("sum", [x])
    told = [Path(folder, str(other)) for other in range(world - 1)]
    if rank == world - 1:
        os.kill(int(os.environ["STORE_PID"]), signal.SIGKILL)
        while not all(path.exists() for path in told):
            time.sleep(0.01)
        return ""
    try:
        xm.all_reduce("sum", x)
        torch_xla.sync()
    except PeerLostError as error:
        return str(error)
    finally:
        told[rank].touch()
    return "nothing was raised"


def test_lost_store_of_host_0_is_explained(ranks: Ranks, tmp_path: Path) -> None:
    *said, _ = ranks.values(without_store, 4, str(tmp_path), hosts=LOOPBACK)
    for rank, text in enumerate(said):
        assert re.match(
            rf"torch elastic's store at 127.0.0.1:\d+ no longer answers rank {rank // 2}/{rank}, "
            r"which waited in all_reduce sum of float32\[4\].*: the first host, which serves it",
            text,
        ), text


def sent_in_a_circle() -> str:
    rank, world = rehearse()
    import torch
    import torch.distributed as dist
    import torch_xla

    from tpunb.xla.rehearsal.errors import CollectiveError

    dist.init_process_group("xla", init_method="xla://")
    try:
        dist.send(torch.ones(3, device=torch_xla.device()), (rank + 1) % world)
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.filterwarnings("ignore")
def test_deadlock_over_two_hosts_names_the_ranks(ranks: Ranks) -> None:
    said = ranks.values(sent_in_a_circle, 4, hosts=LOOPBACK)
    named = [text for text in said if text.startswith("DeadlockError: ")]
    assert named
    for text in named:
        for rank in ("0/0", "0/1", "1/2", "1/3"):
            assert f"rank {rank}: collective_permute of float32[3]" in text
