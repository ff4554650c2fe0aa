"""A host behind a pipe: what it says wrongly, its clock, its silence; programs stand in for ssh."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from tests.drivers.nodes import until
from tpunb.runs import directory, protocol
from tpunb.runs.protocol import (
    AbandonAttempt,
    AllFinished,
    AttemptFinished,
    AttemptReady,
    Message,
    NodeCommand,
    NodeHere,
    RankExited,
    RanksForked,
    RankState,
    RankStates,
    RunFinished,
    StartAttempt,
    StartNode,
    StopRanks,
    encode_message,
)
from tpunb.runs.spec import Device, RunSpec
from tpunb.utils import processes
from tpunb.worker.supervisor import remote_node
from tpunb.worker.supervisor.nodes import Decision, LocalNode, NodeLost, Report
from tpunb.worker.supervisor.remote_node import (
    Hosts,
    RefusedError,
    RemoteNode,
    Rendezvous,
    describe_differences,
)

SPEC = RunSpec("id", "n", 4, "CPU", "/", (), (), hosts=("h0", "h1"))
SAYS = """
import sys
sys.stdin.buffer.readline()
sys.stdout.buffer.write({said!r})
sys.stdout.flush()
{then}
"""
Make = Callable[..., tuple[RemoteNode, list[Report]]]


@pytest.fixture
def make(starts_processes: None, tmp_path: Path) -> Iterator[Make]:
    """Host 1, whose `tpunb node` says something, and what it is heard to report."""
    run = directory.create_run(tmp_path, "n")
    made: list[RemoteNode] = []

    def make(*said: Message | bytes, then: str = "sys.stdin.read()") -> tuple[RemoteNode, list]:
        data = b"".join(each if isinstance(each, bytes) else encode_message(each) for each in said)
        command = (sys.executable, "-c", SAYS.format(said=data, then=then))
        start = StartNode(str(run.path), {}, 1, "127.0.0.1", 29500)
        node = RemoteNode(1, run, SPEC, NodeCommand(command, start), time.monotonic)
        heard: list[Report] = []
        node.report = heard.append
        made.append(node)
        node.connect()
        return node, heard

    yield make
    for node in made:
        node.close()


def step_until(node: RemoteNode, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        node.step()
        time.sleep(0.01)


def test_what_is_no_message_is_left_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The greeting of a login shell, an endless line, garbage; ranks of another host."""
    monkeypatch.setattr(remote_node, "MOST", 5_000)
    here = NodeHere({}, time.time())
    node, heard = make(
        b"Welcome to h1!\n",
        b"\xff\x01" * 15_000 + b"\n",
        b'{"kind": "RanksForked", "attempt": "no", "pids": 5}\n',
        b'{"kind": "RankStates", "ranks": [{"rank": "x"}], "time": 1}\n',
        b'{"node_rank":1,"nonce":"a","have":0,"proof":"\\ud800"}\n',
        RankExited(0, 1, time.time(), 0, finished=False),
        RanksForked(0, [1]),
        RanksForked(10**12, [1, 2]),
        here,
    )
    step_until(node, lambda: heard)
    assert heard == [here]


def test_times_follow_the_message_that_came_the_fastest(make: Make) -> None:
    """So a failure that follows from a stop never seems to be older than the stop."""
    now = time.time()
    node, heard = make(
        NodeHere({}, now + 1000.0 - 50.0),
        RankStates((), now + 1000.0),
        RankExited(2, 1, now + 1000.0, 0, finished=False),
    )
    step_until(node, lambda: len(heard) == 2)
    exited = heard[1]
    assert isinstance(exited, RankExited)
    assert now <= exited.time < time.time() + 1.0


def test_memory_of_ranks_is_shown_as_on_this_machine(make: Make) -> None:
    states = tuple(RankState(rank, "S", 1.0, 5, 50_000_000) for rank in (0, 2))
    node, _ = make(RankStates(states, time.time()))
    step_until(node, node.states)
    assert node.states() == list(states[1:])
    run = node._dir
    assert run.memory(0, 2).read_text() == "50000000\n"
    assert not run.memory(0, 0).exists()  # a rank of another host


def test_a_pipe_that_ends_says_why(make: Make) -> None:
    then = "print('Timeout, server h1 not responding.', file=sys.stderr); sys.exit(255)"
    node, heard = make(NodeHere({}, time.time()), then=then)
    step_until(node, lambda: node.over)
    lost = heard[-1]
    assert isinstance(lost, NodeLost)
    assert lost.reason == "was lost: Timeout, server h1 not responding. (exit code 255)"
    assert node.ended


def test_a_node_that_ends_before_the_run_begins(make: Make) -> None:
    """It was terminated, or cannot read the run's spec."""
    node, heard = make(RunFinished("/"))
    step_until(node, lambda: node.over)
    assert heard == [NodeLost("could not start: it has ended by itself", ANY)]


TOUCH = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(600)
"""


def make_hosts(folder: Path, send: tuple[str, ...], device: Device = "CPU") -> Hosts:
    """Two hosts whose `tpunb node` says nothing, but leaves a file with its number."""
    run = directory.create_run(folder, "n")
    nodes = tuple(
        NodeCommand(
            (sys.executable, "-c", TOUCH, str(folder / str(number))),
            StartNode(str(run.path), {}, number, "127.0.0.1", 29500),
        )
        for number in range(2)
    )
    return Hosts(run, replace(SPEC, device=device), protocol.Pod(nodes, send, ()))


@pytest.mark.usefixtures("starts_processes")
def test_files_that_cannot_be_sent(tmp_path: Path) -> None:
    refused = pytest.raises(RefusedError, match=r"cannot be sent: .*No such file")
    with closing(make_hosts(tmp_path, (str(tmp_path / "python"),))) as hosts, refused:
        hosts.can_begin()


@pytest.mark.usefixtures("starts_processes")
def test_what_copies_files_ends_with_all_below_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with closing(make_hosts(tmp_path, (sys.executable, "-c", WITH_CHILD, str(told)))) as hosts:
        until(lambda: not hosts.can_begin() and told.exists() and told.read_text().endswith("\n"))
        child = processes.find_process(int(told.read_text()))
        assert child is not None
    until(lambda: not processes.is_alive(child))


@pytest.mark.usefixtures("starts_processes")
def test_runs_queue_for_the_tpu_of_the_first_host_first(tmp_path: Path) -> None:
    """Two that begin at once would each get one host, and wait for the other."""
    with closing(make_hosts(tmp_path, ("true",), "TPU")) as hosts:
        until(lambda: not hosts.can_begin() and (tmp_path / "0").exists())
        assert [node.descriptor is None for node in hosts.nodes] == [False, True]
        hosts.take_facts(hosts.nodes[0], {})
        until(lambda: not hosts.can_begin() and (tmp_path / "1").exists())
        for node in hosts.nodes:
            node.close()


def test_a_node_that_is_silent_is_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped, or a machine that has frozen: ssh may still be there."""
    monkeypatch.setattr(remote_node, "LOST", 0.3)
    node, heard = make(NodeHere({}, time.time()))
    step_until(node, lambda: node.over)
    lost = heard[-1]
    assert isinstance(lost, NodeLost)
    assert lost.reason.startswith("was lost: no sign of life for ")
    assert time.time() - lost.time >= 0.3


def test_a_pause_of_this_process_is_no_silence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node, heard = make(NodeHere({}, time.time()))
    step_until(node, lambda: heard)
    now = time.monotonic() + 3600.0
    monkeypatch.setattr(node, "_clock", lambda: now)
    node.step()
    assert not node.over


def test_a_command_that_cannot_be_started(make: Make, tmp_path: Path) -> None:
    node, heard = make()
    node.close()
    node._order = NodeCommand((str(tmp_path / "ssh"),), node._order.start)
    node.connect()
    assert isinstance(heard[-1], NodeLost)
    assert heard[-1].reason.endswith("ssh cannot be started: No such file or directory")


class _Told(LocalNode):
    def __init__(self, number: int) -> None:
        self.number = number
        self.told: list[Decision] = []

    def decide(self, decision: Decision) -> None:
        self.told.append(decision)


def test_attempts_begin_and_end_on_all_hosts_together() -> None:
    nodes = [_Told(0), _Told(1)]
    meeting = Rendezvous(nodes, "10.0.0.2")
    meeting.take(nodes[1], AttemptReady(0, 0))
    assert nodes[0].told == []
    meeting.take(nodes[0], AttemptReady(0, 29500))
    meeting.take(nodes[0], AttemptFinished(0))
    meeting.take(nodes[1], StopRanks())
    meeting.take(nodes[0], StopRanks())  # they follow from each other
    for node in nodes:
        meeting.take(node, AttemptReady(1, 29501 if node.number == 0 else 0))
    for node in nodes:
        assert not meeting.all_finished
        meeting.take(node, AttemptFinished(1))
    assert meeting.all_finished
    assert (
        nodes[0].told
        == nodes[1].told
        == [
            StartAttempt(0, "10.0.0.2", 29500),
            AbandonAttempt(0),
            StartAttempt(1, "10.0.0.2", 29501),
            AllFinished(),
        ]
    )


def test_differences_between_hosts() -> None:
    facts = [{"torch": "2.9.0", "chips": "4"}, {"torch": "2.9.0", "chips": "4"}]
    assert describe_differences(["h0", "h1"], facts) == ""
    other = {"torch": "2.8.0", "chips": "4", "torch_xla": "2.8.0"}
    assert describe_differences(["h0", "h1", "h2"], [*facts, other]) == (
        "torch: 2.9.0 on h0, h1, but 2.8.0 on h2; torch_xla: none on h0, h1, but 2.8.0 on h2"
    )


def test_an_outbox_never_waits_for_its_reader(make: Make) -> None:
    import os

    reading, writing = os.pipe()
    outbox = protocol.Outbox(writing)
    for number in range(2000):
        outbox.send(RanksForked(number, list(range(50))))
    assert outbox.size
    os.set_blocking(reading, False)
    reader, read = protocol.MessageReader(reading), []
    while len(read) < 2000:
        read += reader.read()
        outbox.flush()
    assert read[-1] == RanksForked(1999, list(range(50)))
    os.close(reading)
    outbox.send(AllFinished())
    outbox.send(AllFinished())
    assert outbox.closed
    assert (outbox.size, outbox.descriptor) == (0, None)  # nothing to wait for
    os.close(writing)
