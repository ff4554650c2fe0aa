"""Runs on several hosts with torch in the ranks, over real sockets; and a node that is stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.drivers.nodes import REAL, RunOnHosts, until
from tests.fakes import hosts
from tests.fakes.hosts import Pod
from tests.scenarios.test_hosts import GO_ON, Make, make, pod
from tpunb.runs import returns
from tpunb.runs.spec import RunState, StopCause


def test_hang_only_if_every_host_is_idle_and_all_report_where(make: Make) -> None:
    run = make(
        "import os, time\n"
        "print('begun', flush=True)\n"
        "for _ in range(20 if os.environ['RANK'] == '0' else 0):\n"
        "    time.sleep(0.2)\n"
        "    print('alive', flush=True)\n"
        "time.sleep(600)",
        hang_timeout=2.0,
    )
    run.start()
    result = run.wait(120)
    assert result.state is RunState.HUNG
    assert run.text("run.log").count("alive") == 20
    assert result.failure is not None
    lines = result.failure.message.splitlines()
    assert lines[0].startswith("no activity from any rank for ")
    assert lines[1].startswith("h0/0-1,h1/2-3: ")
    assert lines[-1].startswith("If nothing was wrong")
    assert result.stop is not None
    assert result.stop.cause is StopCause.HUNG


def test_a_node_that_is_stopped_is_lost_and_leaves_nothing(make: Make) -> None:
    """SIGSTOP: its pipe does not end. When the pipe is closed, its fork server continues it."""
    run = make(GO_ON)
    run.start()
    run.await_lines("begun")
    os.kill(run.supervisor_of(1), signal.SIGSTOP)
    result = run.wait(120)
    assert result.failure is not None
    assert result.failure.headline().startswith("host h1 was lost: no sign of life for ")
    until(lambda: not run.left())


def test_host_numbers_determine_rank_order(tmp_path: Path, starts_processes: None) -> None:
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
            run.start()
            assert run.wait(180).state is RunState.SUCCEEDED
            addresses = [f"[{number}] {number} {pod[number].address}" for number in range(12)]
            assert sorted(run.log()) == sorted(addresses)
        finally:
            run.close()


AVERAGED = """
import os
import torch.distributed as dist
for _ in range(2):  # a second group finds no keys of the first
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    if (os.environ["TPUNB_ATTEMPT"], os.environ["RANK"]) == ("0", "3"):
        raise ValueError("once")
    dist.destroy_process_group()
print("total", total.item(), flush=True)
"""


def test_plain_torch_reduces_over_hosts_also_after_a_retry(make: Make) -> None:
    run = make(AVERAGED, prelude=["import torch"], program=REAL, retries=1)
    run.start()
    result = run.wait(180)
    assert (result.state, result.attempts) == (RunState.SUCCEEDED, 2)
    said = [line for line in run.log() if "] total" in line]
    assert sorted(said) == [f"[{rank}] total 6.0" for rank in range(4)]


STORE = """
import os, time
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
while not os.path.exists("go"):
    time.sleep(0.05)
"""


def test_retry_with_torch_elastic_on_all_hosts_and_returns(make: Make) -> None:
    """With torch, its store on host 0, a prelude on each host, and values of rank 0.

    The only port on which anything listens is that of the store.
    """
    run = make(STORE, prelude=["kept = 40"], program=REAL, retries=1, returns=("value",))
    run.start()
    run.await_lines("] 0 1 0 1", 8)
    listening = {number: host.run(["ss", "-ltnH"]).stdout for number, host in enumerate(run.hosts)}
    assert [line.split()[3] for line in listening[0].splitlines()] == [
        f"{run.hosts[0].address}:29500"
    ]
    assert listening[1] == ""
    Path(run.spec.cwd, "go").touch()
    result = run.wait(180)
    assert result.attempts == 2
    said = [line for line in run.log() if " err]" not in line and "[prelude" not in line]
    assert sorted(said) == sorted(
        2 * [f"[{rank}] 0 1 0 1 {rank // 2} 2 2" for rank in range(run.spec.world_size)]
    )
    # `returns` is fetched by a command of the place, which this run has none of.
    (run.folders[0] / "returns").rename(run.dir.returns)
    assert returns.collect_returns(result, run.spec, run.dir).returns == {"value": 40}
