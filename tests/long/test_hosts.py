"""More of tests/scenarios/test_hosts.py, which takes longer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.drivers.nodes import REAL, RunOnHosts, until
from tests.fakes import hosts
from tests.fakes.hosts import Pod
from tests.scenarios.test_hosts import GO_ON, STORE, Make, make, pod
from tpunb.runs import returns
from tpunb.runs.spec import FailureKind, RunState, StopCause
from tpunb.runs.stream import Alive


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


def test_lost_link_between_hosts_ends_both_sides(make: Make, pod: Pod) -> None:
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


def test_short_loss_of_a_link_does_not_end_the_run(make: Make, pod: Pod) -> None:
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


def test_lost_host_0_is_named_by_the_other_hosts(make: Make, pod: Pod) -> None:
    run = make(GO_ON, count=3)
    run.start_all()
    run.await_lines("begun")
    pod[0].cut()
    pod[0].kill()
    assert run.wait(1, 2) == [1, 1]
    for number in (1, 2):
        failure = run.nodes[number].failure()
        assert failure.headline() == "host h0 was lost: no heartbeat for 3 s"


def test_timeout_names_a_host_that_never_connects(make: Make) -> None:
    run = make("print('done')", count=3)
    for number in (0, 1):
        run.start(number, patience=2.0)
    assert run.wait() == [1, 1]
    for node in run.nodes.values():
        failure = node.failure()
        assert failure.headline() == "host h2 has not connected within 2 s"
        assert not node.log()


def test_stop_of_all_hosts_when_the_kernel_is_silent(make: Make) -> None:
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


def test_detached_run_on_hosts_continues_and_is_followed_later(make: Make) -> None:
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


def test_port_in_use_is_named(make: Make) -> None:
    run = make(GO_ON)
    run.start_all()
    run.await_lines("begun")
    other = make("print('done')")
    other.start(0)
    assert other.wait() == [1]
    failure = other.nodes[0].failure()
    assert failure.kind is FailureKind.REFUSED
    assert failure.headline() == (
        "cannot listen for the other hosts: port 29500 of 10.77.0.2: Address already in use"
    )
    # One that meets the first run's host 0 instead of its own says so.
    other.start(1, patience=2.0)
    assert other.nodes[1].wait() == 1
    failure = other.nodes[1].failure()
    assert f"another program listens there, not run {other.spec.id}" in failure.headline()
    run.stop(0)
    assert run.wait() == [130, 130]


def test_version_mismatch_on_one_host_is_refused_before_the_start(make: Make) -> None:
    run = make("print('done')", count=3)
    (run.folders[2] / "script.py").write_text("print('other')\n")
    run.start_all()
    assert run.wait() == [1, 1, 1]
    for node in run.nodes.values():
        failure = node.failure()
        assert failure.kind is FailureKind.REFUSED
        assert failure.headline().startswith("the script: ")
        assert failure.headline().endswith(" on h2")
        assert not node.log()


def test_host_with_a_wrong_key_is_rejected(make: Make) -> None:
    run = make("print('done')")
    run.start(0, patience=4.0)
    run.start(1, patience=4.0, key="ab" * 32)
    assert run.wait() == [1, 1]
    first, second = (run.nodes[number].result().failure for number in (0, 1))
    assert first is not None
    assert second is not None
    assert first.headline() == "host h1 has not connected within 4 s"
    assert "is the key the same?" in second.headline()


@pytest.mark.usefixtures("starts_processes")
def test_host_numbers_determine_rank_order(tmp_path: Path) -> None:
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
    run.start_all("--lost-after", "30s")  # it trains on a busy machine
    assert run.wait() == [0, 0]
    said = [line for node in run.nodes.values() for line in node.log() if "] total" in line]
    assert sorted(said) == [f"[{rank}] total 6.0" for rank in range(4)]
    assert run.nodes[0].result().attempts == 2


def test_retry_with_torch_elastic_on_all_hosts_and_returns(make: Make) -> None:
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
