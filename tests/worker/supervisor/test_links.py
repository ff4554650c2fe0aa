"""Connections between supervisors, over real sockets, with any program at the other end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tpunb.runs.protocol import AllFinished, Beat, HostEnded, Message, encode_message
from tpunb.utils.descriptors import wait_readable
from tpunb.worker.supervisor import links
from tpunb.worker.supervisor.links import Channel, Connection, Dialer, Listener, proof

KEY = bytes(range(32))
RUN = "20261123-000000-nb"


STRANGE = [
    b"\n",
    b"\0\n",
    b"\xff\xfe\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * (links.MOST_UNKNOWN + 1),
    b"[" * 4000 + b"\n",
    b"9" * 4000 + b"\n",
    b'{"run": "20261123-000000-nb", "node_rank": 1}\n',
    b'{"node_rank":1,"nonce":"a","have":0,"proof":"\\ud800"}\n',
    b'{"node_rank":1,"nonce":"a","have":0,"proof":"\xed\xa0\x80"}\n',
    '{"node_rank":1,"nonce":"a","have":0,"proof":"\\ud800"}'.encode("utf-16") + b"\n",
    b'{"run": "20261123-000000-nb", "nonce": ' + b"[" * 960 + b"]" * 960 + b"}\n",
]
"""What any program may send instead of a line of this protocol."""


class Ends:
    """Host 0's end and host 1's, each with its channel."""

    def __init__(
        self, key: bytes = KEY, run: str = RUN, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.listener = Listener(RUN, KEY, "127.0.0.1", 0, range(1, 3), clock)
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


def test_link_skips_lines_that_are_no_messages(make: Make) -> None:
    ends = make()
    ends.connect()
    assert ends.member.connection is not None
    for line in (*STRANGE, b"9" * 5000 + b" " + encode_message(Beat())):
        ends.member.connection.send(line)
    ends.member.send(HostEnded({}, 0.0))
    assert read(ends.leader, 1) == [HostEnded({}, 0.0)]


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


def _dial(*answers: Callable[[bytes], bytes]) -> str:
    """The problem of a host when the program at host 0's port sends these, in answer to lines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = Dialer(RUN, KEY, 1, "127.0.0.1", ("127.0.0.1", server.getsockname()[1]))
        assert dialer.step(0, 5.0) is None
        end, _ = server.accept()
        with end:
            heard = b""
            for answer in answers:
                end.sendall(answer(heard))
                end.setblocking(False)
                heard = b""
                deadline = time.monotonic() + 20
                while not dialer.problem and not heard.endswith(b"\n"):
                    assert dialer.step(0, 60.0) is None
                    assert time.monotonic() < deadline
                    with contextlib.suppress(BlockingIOError, ConnectionResetError):
                        heard += end.recv(4096)
        return dialer.problem


def _greet(heard: bytes) -> bytes:
    return json.dumps({"run": RUN, "nonce": "00"}).encode() + b"\n"


@pytest.mark.parametrize("line", STRANGE)
def test_link_rejects_any_other_program_at_the_port_of_host_0(line: bytes) -> None:
    assert _dial(lambda heard: line) == f"another program listens there, not run {RUN}"


@pytest.mark.parametrize(
    "answer",
    [
        *(lambda heard, line=line: line for line in STRANGE),
        # The received proof is useless for a proof of its own.
        lambda heard: json.dumps({"proof": json.loads(heard)["proof"], "have": 0}).encode() + b"\n",
        lambda heard: b'{"proof":"\\ud800","have":0}\n',
    ],
)
def test_link_rejects_a_leader_without_the_key(answer: Callable[[bytes], bytes]) -> None:
    refused = "the program that listens there does not have the run's key"
    assert _dial(_greet, answer) == refused


def _answer(listener: Listener, line: Callable[[str], bytes]) -> bytes:
    """The data that a program receives after it answers the greeting with this line."""
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


def _claim(given: str, /, **values: object) -> bytes:
    """The answer to a greeting, with the proof that belongs to these values."""
    claimed = {"node_rank": 1, "nonce": "", "have": 0, **values}
    own = proof(KEY, str(claimed["node_rank"]), RUN, given, claimed["nonce"], claimed["have"])
    return json.dumps({"proof": own, **claimed}).encode() + b"\n"


@pytest.mark.parametrize(
    "line",
    [
        *(lambda nonce, line=line: line for line in STRANGE),
        *(
            lambda nonce, field=field, value=value: _claim(nonce, **{field: value})
            for field, values in {
                "node_rank": (3, 0, -1, True, 1.0, "1", [1], 10**3000, None),
                "have": (-1, True, 0.0, math.nan, "0", {}, 10**3000, None),
                "nonce": (0, None, [""]),
                "proof": (0, None, [], "", "\ud800", "\0", "é" * 64),
            }.items()
            for value in values
        ),
        # A proof that host 1 has sent before.
        lambda nonce: _claim("another nonce"),
    ],
)
def test_link_rejects_invalid_first_lines(make: Make, line: Callable[[str], bytes]) -> None:
    ends = make()
    heard = _answer(ends.listener, line)
    assert set(json.loads(heard)) == {"run", "nonce"}  # and nothing after it
    ends.connect()


TEXT = st.text(max_size=9) | st.text("\ud800\udfff\0é0a", max_size=9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
LINES = st.binary(max_size=50) | st.builds(
    lambda text, others, encoding: json.dumps(
        {"node_rank": 1, "nonce": "a", "have": 0, "proof": text, **others}
    ).encode(encoding),
    TEXT,
    st.dictionaries(st.sampled_from(["node_rank", "nonce", "have", "proof"]), JSON, max_size=2),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"]),
)


def test_link_rejects_generated_lines(make: Make) -> None:
    ends = make()

    @settings(max_examples=examples(400))
    @given(LINES)
    def send(line: bytes) -> None:
        heard = _answer(ends.listener, lambda nonce: line + b"\n")
        assert set(json.loads(heard)) == {"run", "nonce"}

    send()
    ends.connect()


@pytest.mark.parametrize("reset", [False, True])
def test_link_drops_half_a_line(make: Make, reset: bool) -> None:
    """Followed by silence, or by a reset."""
    now = 0.0
    ends = make(clock=lambda: now)
    with socket.create_connection(("127.0.0.1", ends.listener.port)) as end:
        end.sendall(b'{"node_rank": 1')
        assert ends.listener.accept() == []
        assert len(ends.listener._unknown) == 1
        if reset:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            now = links.PROVE_WITHIN + 1
    deadline = time.monotonic() + 20
    while ends.listener._unknown:
        assert ends.listener.accept() == []
        assert time.monotonic() < deadline
    ends.connect()


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


@contextlib.contextmanager
def _files_limited_to(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_link_leaves_most_files_to_the_supervisor(make: Make) -> None:
    with _files_limited_to(200):
        ends = make()
    with contextlib.ExitStack() as strangers:
        for _ in range(60):
            strangers.enter_context(socket.create_connection(("127.0.0.1", ends.listener.port)))
            assert ends.listener.accept() == []
        assert len(ends.listener._unknown) == 50


def test_link_is_not_held_up_by_many_connections(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that connects faster than connections are accepted keeps no supervisor waiting."""
    monkeypatch.setattr(links, "MOST_WAITING", 3)
    ends = make()
    with contextlib.ExitStack() as strangers:
        waiting = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", ends.listener.port)))
            for _ in range(10)
        ]
        assert ends.listener.accept() == []
        assert len(wait_readable([end.fileno() for end in waiting], 5.0)) <= 3
        ends.connect()


def test_link_survives_that_no_file_can_be_opened(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ends = make()
    with socket.create_connection(("127.0.0.1", ends.listener.port)):
        os.close(free := os.dup(0))
        with _files_limited_to(free):
            for _ in range(100):
                assert ends.listener.accept() == []
        assert len(caplog.records) <= 7
        ends.connect()
