"""Connections between supervisors, over real sockets, with any program at the other end."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tpunb.runs.protocol import AllFinished, Beat, HostEnded, Message
from tpunb.worker.supervisor import links
from tpunb.worker.supervisor.links import Channel, Connection, Dialer, Listener, proof

KEY = bytes(range(32))
RUN = "20261123-000000-nb"


class Ends:
    """Host 0's end and host 1's, each with its channel."""

    def __init__(self, key: bytes = KEY, run: str = RUN) -> None:
        self.listener = Listener(RUN, KEY, "127.0.0.1", 0, range(1, 3))
        self.dialer = Dialer(run, key, 1, "127.0.0.1", ("127.0.0.1", self.listener.port))
        self.leader, self.member = Channel(), Channel()

    def accept(self) -> bool:
        for node, connection, have, nonce in self.listener.accept():
            assert node == 1
            self.listener.welcome(connection, nonce, self.leader.have)
            self.leader.attach(connection, have)
            return True
        return False

    def dial(self) -> bool:
        made = self.dialer.step(self.member.have, 5.0)
        if made is not None:
            self.member.attach(*made)
        return made is not None

    def connect(self) -> None:
        taken = dialled = False
        deadline = time.monotonic() + 20
        while not (taken and dialled):
            taken, dialled = self.accept() or taken, self.dial() or dialled
            assert time.monotonic() < deadline, self.dialer.problem

    def close(self) -> None:
        self.listener.close()
        self.dialer.close()
        self.leader.close()
        self.member.close()


Make = Callable[..., Ends]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Ends] = []

    def make(**options: object) -> Ends:
        made.append(Ends(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for ends in made:
        ends.close()


def read(channel: Channel, count: int) -> list[Message]:
    messages: list[Message] = []
    deadline = time.monotonic() + 20
    while len(messages) < count:
        messages += channel.read()
        assert time.monotonic() < deadline
    return messages


def test_link_sends_messages_both_ways(make: Make) -> None:
    ends = make()
    ends.connect()
    ends.member.send(HostEnded({"traceback": "é" * 300_000}, 1.0))
    ends.leader.send(AllFinished())
    (ended,) = read(ends.leader, 1)
    assert isinstance(ended, HostEnded)
    assert len(ended.result["traceback"]) == 300_000
    assert read(ends.member, 1) == [AllFinished()]


def test_link_reconnect_loses_and_repeats_no_message(make: Make) -> None:
    ends = make()
    ends.connect()
    for number in range(3):
        ends.member.send(HostEnded({"n": number}, 0.0))
    read(ends.leader, 2)
    # The old connection is gone, with the messages on their way; both ends continue.
    assert ends.member.connection is not None
    ends.member.connection.close()
    ends.member.send(HostEnded({"n": 3}, 0.0))
    ends.member.beat(Beat())
    ends.leader.send(AllFinished())
    ends.connect()
    rest = [m.result["n"] for m in read(ends.leader, 1) if isinstance(m, HostEnded)]
    while rest[-1] != 3:
        rest += [m.result["n"] for m in ends.leader.read() if isinstance(m, HostEnded)]
    assert rest in ([2, 3], [3])
    assert read(ends.member, 1) == [AllFinished()]


def test_link_detects_the_end_of_the_other_process(make: Make) -> None:
    ends = make()
    ends.connect()
    assert not ends.leader.ended
    ends.member.beat(Beat())
    assert read(ends.leader, 1) == [Beat()]
    assert ends.member.connection is not None
    ends.member.connection.close()
    deadline = time.monotonic() + 20
    while not ends.leader.ended:
        ends.leader.read()
        assert time.monotonic() < deadline


def test_link_delivers_last_messages_before_close(make: Make) -> None:
    """If a socket is closed with unread data, the system discards the data that it sent."""
    ends = make()
    ends.connect()
    for number in range(100):
        ends.member.send(HostEnded({"n": number}, 0.0))
    ends.leader.send(AllFinished())
    assert ends.member.connection is not None
    messages = read(ends.member, 1)
    ends.member.close()
    ends.leader.close(deadline=time.monotonic() + 20)
    assert messages == [AllFinished()]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"key": bytes(32)}, "host 0 closed the connection (is the key the same?)"),
        ({"run": "another"}, "another program listens there, not run another"),
    ],
)
def test_link_rejects_a_wrong_key_or_another_run(make: Make, options: dict, problem: str) -> None:
    ends = make(**options)
    deadline = time.monotonic() + 20
    while ends.dialer.problem != problem:
        assert not ends.accept()
        assert not ends.dial()
        assert time.monotonic() < deadline, ends.dialer.problem


def test_link_rejects_a_leader_without_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = Dialer(RUN, KEY, 1, "127.0.0.1", ("127.0.0.1", server.getsockname()[1]))
        assert dialer.step(0, 5.0) is None
        end, _ = server.accept()
        with end:
            end.sendall(json.dumps({"run": RUN, "nonce": "00"}).encode() + b"\n")
            end.setblocking(False)
            heard = b""
            deadline = time.monotonic() + 20
            while not dialer.problem:
                assert dialer.step(0, 20.0) is None
                assert time.monotonic() < deadline
                try:
                    heard += end.recv(4096)
                except BlockingIOError:
                    continue
                if heard.endswith(b"\n"):
                    # The received proof is useless for a proof of its own.
                    answer = {"proof": json.loads(heard)["proof"], "have": 0}
                    end.sendall(json.dumps(answer).encode() + b"\n")
                    heard = b""
        assert dialer.problem == "the program that listens there does not have the run's key"


def _answer(listener: Listener, line: Callable[[str], bytes]) -> bytes:
    """The data that a program receives after it answers the greeting with `answer`."""
    with socket.create_connection(("127.0.0.1", listener.port)) as end:
        end.settimeout(0.05)
        heard, answered = b"", False
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert listener.accept() == []
            try:
                data = end.recv(4096)
            except TimeoutError:
                continue
            except ConnectionResetError:
                return heard
            if not data:
                return heard
            heard += data
            if not answered:
                answered = True
                end.sendall(line(json.loads(heard)["nonce"]))
        raise AssertionError("it was left waiting")


@pytest.mark.parametrize(
    "line",
    [
        lambda nonce: b"GET / HTTP/1.1\r\n\r\n",
        lambda nonce: b"x" * (links.MOST_UNKNOWN + 1),
        lambda nonce: b'{"node_rank": 1}\n',
        lambda nonce: b"[" * 4000 + b"\n",
        # A run with two other hosts has no third one.
        lambda nonce: (
            json.dumps(
                {
                    "node_rank": 3,
                    "nonce": "",
                    "have": 0,
                    "proof": proof(KEY, "3", RUN, nonce, "", 0),
                }
            ).encode()
            + b"\n"
        ),
        # A proof that host 1 has sent before.
        lambda nonce: (
            json.dumps(
                {
                    "node_rank": 1,
                    "nonce": "",
                    "have": 0,
                    "proof": proof(KEY, "1", RUN, "another nonce", "", 0),
                }
            ).encode()
            + b"\n"
        ),
    ],
)
def test_link_rejects_invalid_first_lines(make: Make, line: Callable[[str], bytes]) -> None:
    heard = _answer(make().listener, line)
    assert set(json.loads(heard)) == {"run", "nonce"}  # and nothing after it


def test_link_reads_little_from_unauthenticated_peers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Connection] = []

    def take(end: socket.socket) -> Connection:
        taken.append(Connection(end))
        return taken[-1]

    monkeypatch.setattr(links, "Connection", take)
    listener = make().listener
    with socket.create_connection(("127.0.0.1", listener.port)) as end:
        end.sendall(bytes(60_000))
        deadline = time.monotonic() + 20
        while not taken or not taken[0].broken:
            assert listener.accept() == []
            assert time.monotonic() < deadline
    assert taken[0].read_bytes == links.MOST_UNKNOWN + 1


def test_link_drops_silent_connections_for_new_ones(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MOST_WAITING", 3)
    ends = make()
    silent = []
    for _ in range(6):
        silent.append(socket.create_connection(("127.0.0.1", ends.listener.port)))
        assert ends.listener.accept() == []
    assert len(ends.listener._unknown) == 3
    ends.connect()
    for end in silent:
        end.close()
