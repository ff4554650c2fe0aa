"""Runs on several hosts, and everything that can go wrong between them.

Hosts are network namespaces; the run's supervisor, `tpunb node`, and what they tell each other are
real. The ranks are plain Python, so that a host starts in a second (tests/fakes/torchless.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.nodes import RunOnHosts, until
from tests.fakes import hosts
from tests.fakes.hosts import Pod
from tpunb.runs import state
from tpunb.runs.events import Note
from tpunb.runs.spec import FailureKind, RunState, Stop, StopCause
from tpunb.utils import files

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
    try:
        for run in made:
            until(lambda run=run: not run.left(), 40)
    finally:
        for run in made:
            run.close()


def test_hosts_run_the_same_cell_with_their_own_ranks(make: Make) -> None:
    run = make(
        "import os\n"
        "print(*(os.environ[name] for name in ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'SECRET']))",
        count=3,
    )
    run.start({"SECRET": "x"})
    result = run.wait()
    assert (result.state, result.world_size) == (RunState.SUCCEEDED, 6)
    assert result.hosts == ("h0", "h1", "h2")
    until(lambda: run.supervisor.has_exited)  # it was there for this run
    assert len(result.peak_memory) == 6
    assert all(result.peak_memory)
    assert sorted(run.log()) == [f"[{rank}] {rank} {rank % 2} 6 x" for rank in range(6)]
    assert set(os.listdir(run.dir.attempt(0, 0).parent)) == set("012345")
    for number, folder in enumerate(run.folders):
        sent = run.dir.host(number).path / "supervisor.log"
        assert (folder / "supervisor.log").read_bytes().startswith(sent.read_bytes())
        assert "x" not in (folder / "env.json").read_text() if (folder / "env.json").exists() else 1


def test_failure_of_a_rank_stops_all_hosts_and_names_the_host(make: Make) -> None:
    run = make(
        "import os, time\n"
        "if os.environ['RANK'] == '2':\n"
        "    raise ValueError('no such file')\n"
        "time.sleep(600)"
    )
    run.start()
    result = run.wait()
    assert result.state is RunState.FAILED
    assert [(each.rank, each.host, each.cell, each.line) for each in result.failures] == [
        (2, "h1", 1, 3)
    ]
    assert result.headline() == "rank h1/2 failed in cell [1], line 3: ValueError: no such file"


def test_failure_of_the_only_rank_of_a_host_stops_the_others(make: Make) -> None:
    run = make(
        "import os, time\nif os.environ['RANK'] == '1':\n    os._exit(3)\ntime.sleep(600)", ranks=1
    )
    run.start()
    result = run.wait()
    assert [(each.rank, each.exitcode) for each in result.failures] == [(1, 3)]
    assert result.stop is not None
    assert result.stop.cause is StopCause.PEER_FAILED


@pytest.mark.parametrize("ranks", [1, 2])
def test_retry_restarts_all_hosts_together(make: Make, ranks: int) -> None:
    """Also one whose ranks had finished, which then waits for the others."""
    run = make(
        "import os, time\n"
        "rank, attempt = os.environ['RANK'], os.environ['TPUNB_ATTEMPT']\n"
        "print('attempt', attempt, flush=True)\n"
        "if rank == '0' and attempt == '0':\n"
        "    time.sleep(1)\n"
        "    raise ValueError('once')\n",
        retries=2,
        ranks=ranks,
    )
    run.start()
    result = run.wait()
    assert (result.state, result.attempts) == (RunState.SUCCEEDED, 2)
    said = sorted(line.partition("] ")[2] for line in run.log() if " err]" not in line)
    assert said == ["attempt 0"] * 2 * ranks + ["attempt 1"] * 2 * ranks
    notes = [event.text for event in run.dir.read_events() if isinstance(event, Note)]
    failed = "rank h0/0 failed in cell [1], line 6: ValueError: once"
    assert notes == [f"{failed}: starting again (retry 1 of 2)"]


def test_retry_after_ranks_that_had_to_be_killed(make: Make) -> None:
    """As those that wait in native code for the rank that has failed."""
    run = make(
        "import os, signal, time\n"
        "if os.environ['TPUNB_ATTEMPT'] == '0':\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(1 if os.environ['RANK'] == '0' else 600)\n"
        "    raise ValueError('once')",
        retries=1,
        grace=1.0,
    )
    run.start()
    result = run.wait()
    assert (result.state, result.attempts) == (RunState.SUCCEEDED, 2)


def test_a_stop_stops_all_hosts(make: Make) -> None:
    run = make(GO_ON)
    run.start()
    run.await_lines("begun")
    run.stop()
    result = run.wait()
    assert (result.state, result.reason, result.failures) == (RunState.INTERRUPTED, "enough", ())


def test_second_stop_skips_the_grace_period_on_all_hosts(make: Make) -> None:
    run = make(SLOW_TO_END, grace=500.0)
    run.start()
    run.await_lines("begun")
    run.stop()
    run.await_lines("saving")
    run.stop(now=True)
    assert run.wait().state is RunState.INTERRUPTED


def test_lost_host_ends_the_run_and_is_named(make: Make, pod: Pod) -> None:
    run = make(GO_ON, count=3)
    run.start()
    run.await_lines("begun")
    pod[2].kill()
    result = run.wait()
    failure = result.failure
    assert result.state is RunState.FAILED
    assert failure is not None
    assert (failure.kind, failure.host) == (FailureKind.HOST_LOST, "h2")
    assert failure.headline().startswith("host h2 was lost: ")
    assert len(result.failures) == 1


def test_pipe_that_ends_stops_the_ranks_of_its_host(make: Make, pod: Pod) -> None:
    """As ssh ends when its network is gone."""
    run = make(SLOW_TO_END, grace=3.0)
    run.start()
    run.await_lines("begun")
    os.kill(run.pipes()[1], signal.SIGKILL)
    failure = run.wait().failure
    assert failure is not None
    assert failure.headline().startswith("host h1 was lost: ")
    until(lambda: not pod[1].processes(), 20)
    # They had their grace period, though nobody could see that any more.
    assert "saving" in (run.folders[1] / "attempts" / "0" / "2" / "stdout.log").read_text()


def test_crash_of_a_node_ends_the_run(make: Make) -> None:
    run = make(GO_ON)
    run.start()
    run.await_lines("begun")
    os.kill(run.supervisor_of(0), signal.SIGKILL)
    failure = run.wait().failure
    assert failure is not None
    assert (failure.kind, failure.host) == (FailureKind.HOST_LOST, "h0")


def test_host_that_stops_its_ranks_by_itself_is_named(make: Make) -> None:
    """Its machine shuts down, or it has not heard its supervisor for long (a laptop that slept)."""
    run = make(GO_ON)
    run.start()
    run.await_lines("begun")
    os.kill(run.supervisor_of(1), signal.SIGTERM)
    result = run.wait()
    assert (result.state, [each.headline() for each in result.failures]) == (
        RunState.FAILED,
        ["host h1 has stopped its ranks by itself"],
    )


def test_a_stop_ends_the_fetching_of_results(make: Make) -> None:
    run = make("print('done')")
    run.start(fetch=("sleep", "600"))
    until(lambda: run.text("supervisor.log").count("RunFinished") == 2)
    run.stop()
    assert run.wait().state is RunState.INTERRUPTED


@pytest.mark.parametrize("how", ["closes its lifeline", "is killed with its supervisor"])
def test_no_process_is_left_when_the_kernel_has_gone(make: Make, how: str) -> None:
    run = make(GO_ON)
    run.start()
    run.await_lines("begun")
    if how == "closes its lifeline":
        run.supervisor.close()
        result = run.wait()
        assert result.stop is not None
        assert result.stop.cause is StopCause.KERNEL_GONE
    else:
        os.kill(run.supervisor.pid, signal.SIGKILL)
        until(lambda: run.supervisor.has_exited)
    until(lambda: not run.left(), 20)


def test_detached_run_continues_and_is_stopped_through_its_folder(make: Make) -> None:
    run = make(GO_ON)
    run.start(detached=True)
    run.await_lines("begun")
    state.request_stop(run.dir, Stop(reason="from a terminal"))
    until(lambda: not state.run_state(run.dir).active)
    result = state.read_result(run.dir)
    assert result is not None
    assert (result.state, result.reason) == (RunState.INTERRUPTED, "from a terminal")


def test_stop_while_a_host_has_not_answered_yet(make: Make) -> None:
    run = make(GO_ON)
    run.programs[1] = ["sh", "-c", "cat >/dev/null"]
    run.start()
    until(lambda: "NodeHere" in run.text("supervisor.log"))
    run.stop()
    assert run.wait().state is RunState.INTERRUPTED
    assert run.log() == []


def test_hosts_that_differ_are_refused(make: Make) -> None:
    run = make("print('never')")
    files.append_text(run.folders[1] / "script.py", "# another one\n")
    run.start()
    result = run.wait()
    assert [each.kind for each in result.failures] == [FailureKind.REFUSED]
    assert result.headline().startswith("the script: ")
    assert " on h0, but " in result.headline()
    assert run.log() == []


def test_commands_of_the_run_that_fail_are_named(make: Make) -> None:
    """What a host's shell says, and what `tpunb node` does not understand."""
    run = make("print('never')")
    run.programs[1] = ["sh", "-c", "echo Welcome; echo no such interpreter >&2; exit 127"]
    run.start()
    result = run.wait()
    assert result.headline() == "host h1 could not start: no such interpreter (exit code 127)"


def test_full_disk_of_a_host(make: Make, pod: Pod) -> None:
    run = make(
        "import os\n"
        "if os.environ['RANK'] == '2':\n"
        "    open('filled', 'wb').write(b'x' * 2_000_000)\n"
        "print('done')"
    )
    pod[1].small_disk(run.folders[1].parent.parent, "1m")
    inside = pod[1].path(run.folders[1])
    inside.mkdir(parents=True)
    for name in ("spec.json", "script.py"):
        (inside / name).write_bytes((run.folders[1] / name).read_bytes())
    run.start()
    failure = run.wait().failure
    assert failure is not None
    assert (failure.host, failure.type) == ("h1", "OSError")
    assert "No space left on device" in failure.message


def test_nothing_of_tpunb_listens(make: Make, pod: Pod) -> None:
    run = make(GO_ON)
    run.start()
    run.await_lines("begun")
    for host in run.hosts:
        listening = host.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
        assert [line for line in listening if " 0A " in line] == []
    run.stop()
    run.wait()


def test_hosts_that_cannot_resolve_their_own_names(make: Make, pod: Pod) -> None:
    names = {"localhost": "127.0.0.1", **{host.name: host.address for host in pod.hosts}}
    run = make("print('done')")
    for host in run.hosts:
        host.know({"localhost": "127.0.0.1"})
    try:
        run.start()
        assert run.wait().state is RunState.SUCCEEDED
    finally:
        for host in run.hosts:
            host.know(names)
