"""Runs on several hosts, and everything that can go wrong between them.

Hosts are network namespaces; `tpunb node`, supervisors and what hosts tell each other are real.
Ranks are plain Python, so that a host starts in a second (tests/fakes/torchless.py). A host is lost
after 3 s here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.nodes import RunOnHosts, until
from tests.fakes import hosts
from tests.fakes.hosts import Pod
from tpunb.kernel.node import REFUSED
from tpunb.runs.spec import FailureKind, RunState, StopCause

GO_ON = "import os, time\nprint('begun', os.environ['RANK'], flush=True)\ntime.sleep(600)"
"""Until it is stopped."""
SLOW_TO_END = """
import os, time
print("begun", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("saving", flush=True)
    time.sleep(600)
"""

Make = Callable[..., RunOnHosts]


@pytest.fixture(scope="module")
def pod(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    if refused := hosts.why_refused():
        pytest.skip(refused)
    with Pod(3, tmp_path_factory.mktemp("pod")) as pod:
        yield pod


@pytest.fixture
def make(pod: Pod, tmp_path: Path) -> Iterator[Make]:
    """Makes runs; at the end no process may be left on any host."""
    made: list[RunOnHosts] = []

    def make(train: str, *, count: int = 2, **values: Any) -> RunOnHosts:
        folder = tmp_path / str(len(made))
        run = RunOnHosts(pod, folder, train, hosts=pod.hosts[:count], **values)
        made.append(run)
        return run

    yield make
    for host in pod.hosts:
        host.mend()
    left = [run.left() for run in made]
    for run in made:
        run.close()
    assert not any(left), "processes are left on hosts"


def test_hosts_run_the_same_cell_with_their_own_ranks(make: Make) -> None:
    run = make(
        "import os\n"
        "print(*(os.environ[name] for name in ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'SECRET']))",
        count=3,
    )
    run.start_all(variables={"SECRET": "x"})
    assert run.wait() == [0, 0, 0]
    said = [line.partition("] ")[2] for node in run.nodes.values() for line in node.log()]
    assert sorted(said) == [f"{rank} {rank % 2} 6 x" for rank in range(6)]
    for number, node in run.nodes.items():
        assert node.hello.node_rank == number
        assert node.hello.host == f"h{number}"
        assert node.end is not None
        result = node.result()  # that of the whole run, on every host
        assert (result.state, result.world_size) == (RunState.SUCCEEDED, 6)
        assert result.hosts == ("h0", "h1", "h2")
        assert len(result.peak_memory) == 6
        assert all(result.peak_memory)
        # What was streamed is what is in the folder.
        for name in ("run.log", "events.jsonl", "result.json", "supervisor.log"):
            assert node.files[name] == (node.folder / name).read_bytes()
        own = {str(rank) for rank in run.spec.ranks_on(number)}
        assert set(os.listdir(node.folder / "attempts" / "0")) == own


def test_a_rehearsal_of_a_tpu_on_several_hosts_is_refused(make: Make) -> None:
    run = make("print('never')", backend="xla")
    run.start_all()
    assert run.wait() == [REFUSED, REFUSED]
    for node in run.nodes.values():
        assert node.end is not None
        assert node.end.message.startswith("torch_xla is rehearsed on one host")


def test_failure_of_a_rank_stops_all_hosts_and_names_the_host(make: Make) -> None:
    run = make(
        "import os, time\n"
        "if os.environ['RANK'] == '2':\n"
        "    raise ValueError('no such file')\n"
        "time.sleep(600)"
    )
    run.start_all()
    assert run.wait() == [1, 1]
    result = run.nodes[0].result()
    assert result.state is RunState.FAILED
    assert result.failure is not None
    assert (result.failure.rank, result.failure.host) == (2, "h1")
    assert (result.failure.cell, result.failure.line) == (1, 3)
    assert len(result.failures) == 1
    assert result.headline() == "rank h1/2 failed in cell [1], line 3: ValueError: no such file"
    assert replace(run.nodes[1].result(), dir=result.dir) == result


def test_retry_restarts_all_hosts_together(make: Make) -> None:
    """Also one whose ranks had finished, which then waits for the others."""
    run = make(
        "import os, time\n"
        "rank, attempt = os.environ['RANK'], os.environ['TPUNB_ATTEMPT']\n"
        "print('attempt', attempt, flush=True)\n"
        "if rank == '0' and attempt == '0':\n"
        "    time.sleep(1)\n"
        "    raise ValueError('once')\n",
        retries=2,
    )
    run.start_all()
    assert run.wait() == [0, 0]
    for node in run.nodes.values():
        said = [line.partition("] ")[2] for line in node.log() if " err]" not in line]
        assert sorted(said) == ["attempt 0"] * 2 + ["attempt 1"] * 2
    assert run.nodes[0].result().attempts == 2
    assert "rank h0/0 failed in cell [1], line 6: ValueError: once" in run.nodes[0].text(
        "events.jsonl"
    )
    assert "rank h0/0 has failed: starting again" in run.nodes[1].text("events.jsonl")


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_at_any_host_stops_all(make: Make, asked: int) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    run.stop(asked, "enough")
    assert run.wait() == [130, 130]
    for node in run.nodes.values():
        result = node.result()
        assert result.state is RunState.INTERRUPTED
        assert result.reason == "enough"
        assert result.failures == ()


def test_second_stop_skips_the_grace_period_on_all_hosts(make: Make) -> None:
    run = make(SLOW_TO_END, grace=500.0)
    run.start_all()
    run.await_lines("begun")
    run.stop(1)
    run.await_lines("saving")
    run.stop(0, now=True)
    assert run.wait() == [130, 130]


def test_lost_host_ends_the_run_and_is_named(make: Make, pod: Pod) -> None:
    run = make(GO_ON, count=3)
    run.start_all()
    run.await_lines("begun")
    pod[2].kill()
    assert run.wait(0, 1) == [1, 1]
    for number in (0, 1):
        failure = run.nodes[number].failure()
        assert (failure.kind, failure.host) == (FailureKind.HOST_LOST, "h2")
        assert failure.headline().startswith("host h2 was lost")


def test_crash_of_the_supervisor_on_host_0(make: Make) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    [supervisor] = _children(run.nodes[0].process.pid)
    os.kill(supervisor, signal.SIGKILL)
    assert run.wait() == [1, 1]
    failure = run.nodes[1].failure()
    assert failure.headline() == "host h0 was lost: its supervisor has ended"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_timeout_if_host_0_is_never_reachable(make: Make) -> None:
    run = make("print('done')")
    run.start(1, patience=2.0)
    assert run.wait() == [1]
    failure = run.nodes[1].failure()
    assert failure.headline() == (
        "host h0 could not be reached at 10.77.0.2:29500 within 2 s (Connection refused)"
    )


def test_stop_of_all_hosts_when_the_starting_kernel_has_gone(make: Make) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    for node in run.nodes.values():
        assert node.process.stdin is not None
        node.process.stdin.close()
    assert run.wait() == [130, 130]
    stop = run.nodes[0].result().stop
    assert stop is not None
    assert stop.cause is StopCause.KERNEL_GONE


@pytest.mark.parametrize("number", [0, 1])
def test_stop_of_a_host_before_it_has_connected(make: Make, number: int) -> None:
    run = make(GO_ON)
    node = run.start(number, patience=500.0)
    until(lambda: "ordered" in node.text("supervisor.log"))
    run.stop(number)
    assert run.wait() == [130]


def test_hosts_that_cannot_resolve_their_own_names(make: Make, pod: Pod) -> None:
    names = {"localhost": "127.0.0.1", **{host.name: host.address for host in pod.hosts}}
    run = make("print('done')")
    for host in run.hosts:
        host.know({"localhost": "127.0.0.1"})
    try:
        run.start_all()
        assert run.wait() == [0, 0]
    finally:
        for host in run.hosts:
            host.know(names)


def test_host_0_listens_on_one_address_only(make: Make, pod: Pod) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    listening = pod[0].run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
    local = {line.split()[1] for line in listening if len(line.split()) > 3 and " 0A " in line}
    address = socket.inet_aton(pod[0].address)[::-1].hex().upper()
    assert local == {f"{address}:{29500:04X}"}
    run.stop(0)
    run.wait()


STRANGER = """
import socket, sys, time
for line in (
    b'{"node_rank":1,"nonce":"a","have":0,"proof":"\\\\ud800"}\\n', b"\\xff\\n", b"9" * 5000
):
    deadline = time.monotonic() + 60
    while True:
        try:
            end = socket.create_connection((sys.argv[1], 29500), 60)
            break
        except ConnectionRefusedError:  # the run has not begun
            assert time.monotonic() < deadline
            time.sleep(0.1)
    with end:
        assert end.recv(4096).startswith(b'{"run": ')
        end.sendall(line)
        try:
            assert end.recv(4096) == b""
        except ConnectionResetError:
            pass
"""


def test_strangers_who_reach_the_port_of_host_0(make: Make, pod: Pod) -> None:
    """Before the other host has connected, and while the ranks run."""
    run = make(GO_ON)
    stranger = [sys.executable, "-c", STRANGER, pod[0].address]
    run.start(0)
    pod[2].run(stranger, check=True)
    run.start(1)
    run.await_lines("begun")
    pod[2].run(stranger, check=True)
    run.stop(0, "enough")
    assert run.wait() == [130, 130]
    assert run.nodes[0].result().reason == "enough"
    assert run.nodes[0].result().failures == ()


STORE = """
import os
from torch.distributed import TCPStore
env = os.environ
store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]))
rank, world, attempt = int(env["RANK"]), int(env["WORLD_SIZE"]), env["TPUNB_ATTEMPT"]
store.set(f"{attempt}/{rank}", env["LOCAL_RANK"])
local = [store.get(f"{attempt}/{other}").decode() for other in range(world)]
print(*local, env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], flush=True)
store.set(f"{attempt}/said/{rank}", "")
if attempt == "0" and rank == 3:
    store.wait([f"0/said/{other}" for other in range(world)])  # it is stopped with this one
    raise ValueError("once")
value = kept + rank
"""
