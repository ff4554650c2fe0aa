"""A rehearsal on two hosts, as `tpunb node` runs it: the numbers of one host, and the errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.xla.rehearsal.test_rehearsal_training_calls import all_trained
from tests.drivers.nodes import REAL, RunOnHosts
from tests.drivers.ranks import Ranks
from tests.fakes import hosts
from tests.fakes.hosts import Pod
from tests.support import Driver
from tpunb.diagnostics.failure.run import diagnose_log
from tpunb.runs.spec import FailureKind, RunState

DATA = "import torch\ntorch.manual_seed(5)\nfeatures, goal = torch.randn(16, 6), torch.randn(16, 1)"
RUN = """\
import os, torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
torch.manual_seed(1)
device, rank, world = torch_xla.device(), xr.global_ordinal(), xr.world_size()
model = torch.nn.Linear(6, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = (part[rank::world].to(device) for part in (features, goal))
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    xm.optimizer_step(optimizer)
    torch_xla.sync()
    losses.append(xm.mesh_reduce("loss", loss.item(), lambda every: sum(every) / len(every)))
"""
TRAIN = f"""\
import json
import torch.distributed as dist
{RUN}\
dist.init_process_group("xla", init_method="xla://")
total = torch.tensor([float(rank)], device=device)
dist.all_reduce(total)
cpu = dist.new_group(backend="gloo")
everyone = [None] * world
dist.all_gather_object(everyone, rank, group=cpu)
weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).tolist()
print(json.dumps([losses, weights, total.item(), everyone]))
"""
WRONG = """\
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
x = torch.ones(3, device=torch_xla.device())
for step in range(2 if xr.global_ordinal() == 3 else 3):
    x = xm.all_reduce("sum", x)
    torch_xla.sync()
"""
AGAIN = """\
import os, torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
x = torch.ones(3, device=torch_xla.device())
attempt, rank = int(os.environ["TPUNB_ATTEMPT"]), xr.global_ordinal()
for step in range(3):
    if (attempt, rank, step) == (0, 3, 1):
        raise ValueError("once")
    total = xm.all_reduce("sum", x)
print("store", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], total.tolist(), flush=True)
x = torch.ones(4 << 20, device=torch_xla.device())  # goes over gloo
for step in range(100_000):
    xm.all_reduce("sum", [x], scale=0.25)
    if step == 0:
        print("begun", flush=True)
"""
HOLD = """\
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def pod(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    if refused := hosts.why_refused():
        pytest.skip(refused)
    with Pod(2, tmp_path_factory.mktemp("pod")) as pod:
        for host in pod.hosts:
            host.know({"localhost": "127.0.0.1"})  # nobody's name
        yield pod


def ran(
    pod: Pod,
    folder: Path,
    train: str,
    *,
    meanwhile: Callable[[RunOnHosts], None] = lambda run: None,
    lost_after: float = 30.0,
    besides: Iterable[int] = (),
    **values: Any,
) -> RunOnHosts:
    run = RunOnHosts(pod, folder, train, prelude=[DATA], program=REAL, **values)
    try:
        run.start_all(lost_after=lost_after, env={"PJRT_DEVICE": "CPU"})
        meanwhile(run)
        for node in run.nodes.values():
            node.wait(240)
        assert set(run.left()) == set(besides)
    finally:
        run.close()
    return run


def printed(lines: list[str]) -> list[Any]:
    return [json.loads(line[line.index("[[") :]) for line in lines if "[[" in line]


def test_two_hosts_train_like_one_host(pod: Pod, driver: Driver, tmp_path: Path) -> None:
    one = driver.run([DATA], TRAIN, ranks=4).result
    assert one.state is RunState.SUCCEEDED
    expected = printed((one.dir / "run.log").read_text().splitlines())
    run = ran(pod, tmp_path, TRAIN)
    result = run.nodes[0].result()
    assert result.state is RunState.SUCCEEDED, run.nodes[0].text("run.log")
    found = [said for node in run.nodes.values() for said in printed(node.log())]
    assert len(found) == len(expected) == 4
    assert all(said == expected[0] for said in [*found, *expected])  # bit for bit
    losses, _, total, everyone = found[0]
    assert losses[-1] < losses[0]
    assert (total, everyone) == (6.0, [0, 1, 2, 3])
    for number, folder in enumerate(run.folders):
        for rank in run.spec.ranks_on(number):
            numbers = json.loads((folder / f"attempts/0/{rank}/numbers.json").read_text())
            assert (numbers["host"], numbers["local_rank"], numbers["rank"]) == (
                number,
                rank % 2,
                rank,
            )


def test_mismatch_of_batch_counts_names_the_host(pod: Pod, tmp_path: Path) -> None:
    run = ran(pod, tmp_path, WRONG)
    result = run.nodes[1].result()
    assert result.state is RunState.FAILED
    assert result.failure is not None
    assert result.failure.type == "PeerLostError"
    assert result.failure.line == 6
    assert "rank h1/3 has returned from the train cell while rank h" in result.failure.message
    assert "rank h1/3 took part in 2" in result.failure.message
    [cause] = diagnose_log(run.folders[1] / "run.log", None) or []
    assert cause.id == "rendezvous-lost-peer"
    told = " ".join(line.text for line in cause.evidence)
    assert "rank h1/3 has returned from the train cell while rank h" in told


def test_retry_on_hosts_and_lost_link_inside_a_collective(pod: Pod, tmp_path: Path) -> None:
    def cut(run: RunOnHosts) -> None:
        run.await_lines("begun")
        pod[1].cut()

    held = [sys.executable, "-c", HOLD, pod[0].address, "29501"]
    with pod[0].popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            run = ran(
                pod,
                tmp_path,
                AGAIN,
                meanwhile=cut,
                lost_after=5.0,
                besides=[holder.pid],
                retries=1,
            )
        finally:
            holder.communicate()
            pod[1].mend()
    starting = "starting again (retry 1 of 1)"
    assert f"rank h1/3 has failed: {starting}" in run.nodes[0].text("events.jsonl")
    why = "rank h1/3 failed in cell [2], line 8: ValueError: once"
    assert f"{why}: {starting}" in run.nodes[1].text("events.jsonl")
    said = [line for node in run.nodes.values() for line in node.log() if "] store" in line]
    at = f"store {pod[0].address} 29502 [4.0, 4.0, 4.0]"
    assert sorted(said) == [f"[{rank}] {at}" for rank in range(4)]
    for number, other in ((0, "h1"), (1, "h0")):
        result = run.nodes[number].result()
        assert (result.state, result.attempts) == (RunState.FAILED, 2)
        failure = result.failure
        assert failure is not None
        assert (failure.kind, failure.host) == (FailureKind.HOST_LOST, other)
        assert failure.headline() == f"host {other} was lost: no heartbeat for 5 s"
        [cause, *_] = diagnose_log(run.folders[number] / "run.log", None) or []
        assert cause.id == "host-lost"
        assert failure.headline() in str(cause)


# No rank may wait for a name server: on these hosts a query takes 10 s.
LISTEN = """
import socket, sys
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked.bind(("", 53))
print("listens", flush=True)
while True:
    print(asked.recv(512), flush=True)
"""


def test_collectives_over_hosts_without_name_resolution(ranks: Ranks, tmp_path: Path) -> None:
    if refused := hosts.why_refused():
        pytest.skip(refused)
    settings = tmp_path / "resolv.conf"
    with Pod(3) as pod:
        settings.write_text(f"nameserver {pod[2].address}\n")
        for host in pod.hosts:
            host.know({"localhost": "127.0.0.1"})
            resolver = os.path.realpath("/etc/resolv.conf")
            host.run(["mount", "--bind", str(settings), resolver], check=True)
        command = [sys.executable, "-c", LISTEN]
        with pod[2].popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listens\n"
            found = ranks.values(all_trained, 4, hosts=pod.hosts[:2])
            server.terminate()
            assert server.stdout.read() == b""
    assert found[0] == found[3]
