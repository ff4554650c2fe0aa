"""Runs on several hosts, and everything that can go wrong between them.

Hosts are network namespaces; `tpunb node`, supervisors and what hosts tell each other are real.
Ranks are plain Python, so that a host starts in a second (tests/fakes/torchless.py). A host is lost
after 3 s here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.nodes import REAL, ROOT, RunOnHosts, until
from tests.fakes import hosts
from tests.fakes.hosts import Pod
from tpunb.runs import returns
from tpunb.runs.spec import FailureKind, RunState, StopCause, StopOrigin
from tpunb.runs.stream import Alive

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


def test_all_hosts_run_the_same_cell_and_know_who_they_are(make: Make) -> None:
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


def test_a_rank_that_fails_ends_all_hosts_and_is_named_with_its_host(make: Make) -> None:
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


def test_all_hosts_start_again_together(make: Make) -> None:
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


def test_when_no_retry_is_left_all_hosts_end(make: Make) -> None:
    run = make("raise ValueError('always')", retries=1, count=3)
    run.start_all()
    assert run.wait() == [1, 1, 1]
    assert run.nodes[0].result().attempts == 2
    assert {failure.type for failure in run.nodes[0].result().failures} == {"ValueError"}


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


def test_stopped_twice_no_host_waits_for_the_grace_period(make: Make) -> None:
    run = make(SLOW_TO_END, grace=500.0)
    run.start_all()
    run.await_lines("begun")
    run.stop(1)
    run.await_lines("saving")
    run.stop(0, now=True)
    assert run.wait() == [130, 130]


def test_a_stop_that_is_asked_for_in_the_folder_of_one_host(make: Make) -> None:
    """As `tpunb stop` does there."""
    from tpunb.runs import state
    from tpunb.runs.directory import RunDir

    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    state.request_stop(RunDir(run.folders[1]), "by hand", origin=StopOrigin.COMMAND)
    assert run.wait() == [130, 130]
    stop = run.nodes[0].result().stop
    assert stop is not None
    assert (stop.cause, stop.origin) == (StopCause.USER, StopOrigin.COMMAND)


def test_a_run_hangs_only_if_no_host_goes_on_and_all_say_where(make: Make) -> None:
    run = make(
        "import os, time\n"
        "print('begun', flush=True)\n"
        "for _ in range(20 if os.environ['RANK'] == '0' else 0):\n"
        "    time.sleep(0.2)\n"
        "    print('alive', flush=True)\n"
        "time.sleep(600)",
        hang_timeout=2.0,
    )
    run.start_all()
    assert run.wait() == [124, 124]
    result = run.nodes[0].result()
    assert result.state is RunState.HUNG
    assert run.nodes[0].text("run.log").count("alive") == 20
    assert result.failure is not None
    lines = result.failure.message.splitlines()
    assert lines[0].startswith("no activity from any rank for ")
    assert [line.partition(": ")[0] for line in lines[1:-1]] == ["h0", "h1"]
    assert lines[-1].startswith("If nothing was wrong")
    assert result.stop is not None
    assert result.stop.cause is StopCause.HUNG


def test_a_host_that_dies_ends_the_run_and_is_named(make: Make, pod: Pod) -> None:
    run = make(GO_ON, count=3)
    run.start_all()
    run.await_lines("begun")
    pod[2].kill()
    assert run.wait(0, 1) == [1, 1]
    for number in (0, 1):
        failure = run.nodes[number].result().failure
        assert failure is not None
        assert (failure.kind, failure.host) == (FailureKind.HOST_LOST, "h2")
        assert failure.headline().startswith("host h2 was lost")


def test_a_host_whose_link_is_cut_ends_too(make: Make, pod: Pod) -> None:
    """Nobody tells anybody: each side finds out by itself, and names the other."""
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    pod[1].cut()
    assert run.wait() == [1, 1]
    lost = [run.nodes[number].result().failure for number in (0, 1)]
    assert [failure and failure.host for failure in lost] == ["h1", "h0"]
    assert lost[0] is not None
    assert lost[0].headline() == "host h1 was lost: no heartbeat for 3 s"


def test_a_link_that_comes_back_in_time_costs_nothing(make: Make, pod: Pod) -> None:
    """Each time for as long as TCP itself would not come back from within the limit."""
    run = make(
        "import os, time\n"
        "print('begun', flush=True)\n"
        "while not os.path.exists('go'):\n"
        "    time.sleep(0.05)\n"
        "print('done', flush=True)"
    )
    run.start_all()
    run.await_lines("begun")
    for _ in range(3):
        pod[1].cut()
        time.sleep(1.7)
        pod[1].mend()
        time.sleep(1.7)
    Path(run.spec.cwd, "go").touch()
    assert run.wait() == [0, 0]
    assert run.nodes[0].result().state is RunState.SUCCEEDED


def test_the_host_that_leads_is_lost(make: Make, pod: Pod) -> None:
    run = make(GO_ON, count=3)
    run.start_all()
    run.await_lines("begun")
    pod[0].cut()
    pod[0].kill()
    assert run.wait(1, 2) == [1, 1]
    for number in (1, 2):
        failure = run.nodes[number].result().failure
        assert failure is not None
        assert failure.headline() == "host h0 was lost: no heartbeat for 3 s"


def test_the_supervisor_that_leads_is_killed(make: Make) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    [supervisor] = _children(run.nodes[0].process.pid)
    os.kill(supervisor, signal.SIGKILL)
    assert run.wait() == [1, 1]
    failure = run.nodes[1].result().failure
    assert failure is not None
    assert failure.headline() == "host h0 was lost: its supervisor has ended"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_host_may_come_late(make: Make) -> None:
    run = make("print('done')")
    run.start(1)
    until(lambda: run.nodes[1].hello)
    time.sleep(1)
    run.start(0)
    assert run.wait() == [0, 0]


def test_a_host_that_never_comes_is_named(make: Make) -> None:
    run = make("print('done')", count=3)
    for number in (0, 1):
        run.start(number, "--patience", "2s")
    assert run.wait() == [1, 1]
    for node in run.nodes.values():
        failure = node.result().failure
        assert failure is not None
        assert failure.headline() == "host h2 has not connected within 2 s"
        assert not node.log()


def test_host_0_never_comes(make: Make) -> None:
    run = make("print('done')")
    run.start(1, "--patience", "2s")
    assert run.wait() == [1]
    failure = run.nodes[1].result().failure
    assert failure is not None
    assert failure.headline() == (
        "host h0 could not be reached at 10.77.0.2:29500 within 2 s (Connection refused)"
    )


def test_whoever_started_it_is_gone(make: Make) -> None:
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


def test_one_connection_of_whoever_started_it_is_enough(make: Make) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    assert run.nodes[1].process.stdin is not None
    run.nodes[1].process.stdin.close()
    assert run.wait() == [130, 130]


def test_whoever_started_it_is_cut_off(make: Make) -> None:
    """Nothing is closed: it is only not heard any more."""
    run = make(GO_ON)
    run.start_all(alive_within=2.0)
    run.await_lines("begun")
    for _ in range(15):
        for node in run.nodes.values():
            node.send(Alive())
        time.sleep(0.2)
    assert not any(node.end for node in run.nodes.values())
    assert run.wait() == [130, 130]
    stop = run.nodes[0].result().stop
    assert stop is not None
    assert stop.cause is StopCause.KERNEL_GONE


@pytest.mark.parametrize("number", [0, 1])
def test_a_host_is_stopped_before_it_has_met_any_other(make: Make, number: int) -> None:
    run = make(GO_ON)
    node = run.start(number, "--patience", "500s")
    until(lambda: "ordered" in node.text("supervisor.log"))
    run.stop(number)
    assert run.wait() == [130]


def test_a_detached_run_goes_on_and_is_followed_later(make: Make) -> None:
    run = make(
        "import os, time\n"
        "print('begun', flush=True)\n"
        "while not os.path.exists('go'):\n"
        "    time.sleep(0.05)\n"
        "print('done', flush=True)"
    )
    run.start_all("--detach")
    run.await_lines("begun")
    known = [dict(node.files) for node in run.nodes.values()]
    for node in run.nodes.values():
        assert node.process.stdin is not None
        node.process.stdin.close()
    assert run.wait() == [0, 0]
    assert run.left()
    for number, before in enumerate(known):
        run.nodes[number].close()
        followed = run.follow(number, {name: len(data) for name, data in before.items()})
        followed.files = before
    Path(run.spec.cwd, "go").touch()
    assert run.wait() == [0, 0]
    for number, node in run.nodes.items():
        assert node.files["run.log"] == (run.folders[number] / "run.log").read_bytes()
        assert node.result().state is RunState.SUCCEEDED
    until(lambda: not run.left())


def test_a_host_that_cannot_look_itself_up(make: Make, pod: Pod) -> None:
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


def test_two_runs_at_once_on_ports_of_their_own(make: Make) -> None:
    runs = [make("print('done')", port=port) for port in (29510, 29511)]
    for run in runs:
        run.start_all()
    for run in runs:
        assert run.wait() == [0, 0]


def test_a_port_that_is_taken_is_named(make: Make) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    other = make("print('done')")
    other.start(0)
    assert other.wait() == [1]
    failure = other.nodes[0].result().failure
    assert failure is not None
    assert failure.kind is FailureKind.REFUSED
    assert failure.headline() == (
        "cannot listen for the other hosts: port 29500 of 10.77.0.2: Address already in use"
    )
    # One that meets the first run's host 0 instead of its own says so.
    other.start(1, "--patience", "2s")
    assert other.nodes[1].wait() == 1
    failure = other.nodes[1].result().failure
    assert failure is not None
    assert f"another program listens there, not run {other.spec.id}" in failure.headline()
    run.stop(0)
    assert run.wait() == [130, 130]


def test_another_version_on_one_host_is_refused_before_anything_starts(make: Make) -> None:
    run = make("print('done')", count=3)
    (run.folders[2] / "script.py").write_text("print('other')\n")
    run.start_all()
    assert run.wait() == [1, 1, 1]
    for node in run.nodes.values():
        failure = node.result().failure
        assert failure is not None
        assert failure.kind is FailureKind.REFUSED
        assert failure.headline().startswith("the script: ")
        assert failure.headline().endswith(" on h2")
        assert not node.log()


def test_who_has_not_the_key_is_not_let_in(make: Make) -> None:
    run = make("print('done')")
    run.start(0, "--patience", "4s")
    run.start(1, "--patience", "4s", key="ab" * 32)
    assert run.wait() == [1, 1]
    first, second = (run.nodes[number].result().failure for number in (0, 1))
    assert first is not None
    assert second is not None
    assert first.headline() == "host h1 has not connected within 4 s"
    assert "is the key the same?" in second.headline()


def test_host_0_listens_on_the_address_that_is_used_alone(make: Make, pod: Pod) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    listening = pod[0].run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
    local = {line.split()[1] for line in listening if len(line.split()) > 3 and " 0A " in line}
    address = socket.inet_aton(pod[0].address)[::-1].hex().upper()
    assert local == {f"{address}:{29500:04X}"}
    run.stop(0)
    run.wait()


def test_a_full_disk_on_one_host(make: Make, pod: Pod) -> None:
    run = make(
        "import os, time\n"
        "print('begun', flush=True)\n"
        "if os.environ['RANK'] == '2':\n"
        "    time.sleep(1)  # until the other one has its files\n"
        "    with open(os.environ['TPUNB_RUN'] + '/big', 'wb') as file:\n"
        "        file.write(bytes(8_000_000))\n"
        "time.sleep(600)"
    )
    folder = run.folders[1]
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    pod[1].small_disk(folder, "2m")
    for name, data in kept.items():
        pod[1].path(folder / name).write_bytes(data)
    run.start_all()
    assert run.wait() == [1, 1]
    failure = run.nodes[0].result().failure
    assert failure is not None
    assert (failure.host, failure.rank, failure.type) == ("h1", 2, "OSError")
    assert "No space left on device" in failure.message
    pod[1].run(["umount", str(folder)], check=True)


@pytest.mark.usefixtures("starts_processes")
def test_hosts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Not of their addresses' text, in which 10.77.0.10 comes before 10.77.0.2."""
    if refused := hosts.why_refused():
        pytest.skip(refused)
    with Pod(12, tmp_path) as pod:
        run = RunOnHosts(
            pod,
            tmp_path,
            "import os\nprint(os.environ['RANK'], os.environ['TPUNB_ADDRESS'])",
            ranks=1,
        )
        try:
            run.start_all()
            assert run.wait() == [0] * 12
            for number, node in run.nodes.items():
                assert node.log() == [f"[{number}] {number} {pod[number].address}"]
        finally:
            run.close()


def test_a_container_that_finds_out_by_itself_prints_it(make: Make, pod: Pod) -> None:
    run = make("print('done')")
    key = Path(run.spec.cwd, "key")
    key.write_text(run.key)
    started = [
        host.popen(
            [*run.program, "--run", run.folders[number], "--key-file", key],
            env={
                "PYTHONPATH": str(ROOT),
                "TPU_WORKER_ID": str(number),
                "TPU_WORKER_HOSTNAMES": "10.77.0.2,10.77.0.3",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        for number, host in enumerate(run.hosts)
    ]
    said = [process.communicate(timeout=60)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said[1].startswith(
        "tpunb: host 1 of 2 (h1, 10.77.0.3), known from TPU_WORKER_ID and TPU_WORKER_HOSTNAMES; "
        "host 0 listens at 10.77.0.2:29477\n"
    )
    assert "[2] done\n" in said[1]
    assert "has ended: succeeded" in said[1]


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


def test_torch_elastic_starts_ranks_on_all_hosts_again_and_again(make: Make) -> None:
    """With torch, its store on host 0, a prelude on each host, and values of rank 0."""
    run = make(STORE, prelude=["kept = 40"], program=REAL, retries=1, returns=("value",))
    run.start_all()
    assert run.wait() == [0, 0]
    for number, node in run.nodes.items():
        said = [line for line in node.log() if " err]" not in line and "[prelude" not in line]
        expected = [f"[{rank}] 0 1 0 1 {number} 2 2" for rank in run.spec.ranks_on(number)]
        assert sorted(said) == sorted(expected * 2)
        first, second = run.spec.ranks_on(number)
        assert (
            f"[tpunb] h{number}: rank {first} (local rank 0), rank {second} (local rank 1)"
        ) in node.text("run.log").splitlines()
    result = run.nodes[0].result()
    assert result.attempts == 2
    assert result.peak_memory == run.nodes[1].result().peak_memory
    assert returns.collect_returns(result, run.spec).returns == {"value": 40}
