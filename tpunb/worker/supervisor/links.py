"""Connections between the supervisors of a run's hosts: proved, and put back when one is lost.

    host k  ──> host 0    connects, again and again until somebody answers
    host 0  ──> host k    {"run", "nonce"}
    host k  ──> host 0    {"node_rank", "nonce", "proof", "have"}
    host 0  ──> host k    {"proof", "have"}
    then, in both directions, messages (tpunb.runs.protocol), each with its number

A proof is an HMAC of both nonces with the run's key, so the key itself is never sent, and a proof
that was overheard is of no use. `have` is the number of the last message that has come: what was
sent after it is sent again, so none is lost or comes twice when a connection is replaced. Host k
replaces a connection on which nothing comes: after a longer break TCP itself would try only after
as long a time again. Heartbeats have the number 0, and are never sent again.

Nothing here waits: the supervisor calls it in its loop. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from tpunb.runs import protocol
from tpunb.runs.protocol import Message
from tpunb.utils.files import LineBuffer

log = logging.getLogger(__name__)

MOST_UNKNOWN = 4096
"""Bytes from somebody who has proved nothing yet."""
MOST_WAITING = 256
"""Connections of such: the oldest one makes way."""
PROVE_WITHIN = 10.0
"""Seconds for it."""
RETRY = 0.5
"""Seconds between two tries to connect."""
FAREWELL = 2.0
"""Seconds in which what was said last must have gone."""


def proof(key: bytes, who: str, run: str, *parts: object) -> str:
    """What shows that `who` ('host 0', or a node rank) has the key, in hexadecimal digits."""
    text = json.dumps([who, run, *parts]).encode()
    return hmac.new(key, text, "sha256").hexdigest()


class Connection:
    """A socket that does not block, cut into lines."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = end
        self._out = bytearray()
        self._lines = LineBuffer()
        self._early: list[bytes] = []
        self.read_bytes = 0
        self.ended = False
        """The process at the other end has closed it, or is no more."""
        self.broken = ""
        """Why nothing goes through any more; empty while something may."""

    def send(self, line: bytes) -> None:
        """Send a line as soon as there is room."""
        self._out += line
        self.flush()

    def flush(self) -> None:
        """Send what has waited for room."""
        while self._out and not self.broken:
            try:
                sent = self._socket.send(self._out)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(error)
                return
            del self._out[:sent]

    @property
    def all_sent(self) -> bool:
        return not self._out

    def read(self, most: float = math.inf) -> list[bytes]:
        """The lines that have come; nothing is read beyond `most` bytes since the beginning."""
        self.flush()
        lines, self._early = self._early, []
        while not self.broken and self.read_bytes <= most:
            try:
                data = self._socket.recv(int(min(1 << 16, most + 1 - self.read_bytes)))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._fail(error)
                break
            if not data:
                self.ended, self.broken = True, "it was closed"
                break
            self.read_bytes += len(data)
            lines += self._lines.feed(data)
        return lines

    def give_back(self, lines: list[bytes]) -> None:
        """These have been read too early: they come again."""
        self._early = lines + self._early

    def _fail(self, error: OSError) -> None:
        # A reset comes from a machine that is there, on which this connection is not.
        self.ended = error.errno in (errno.ECONNRESET, errno.EPIPE)
        self.broken = error.strerror or str(error)

    def close(self) -> None:
        self._socket.close()
        self.broken = self.broken or "it is closed here"

    def close_after_last_words(self, deadline: float) -> None:
        """Close once everything was sent and the other end has read it, or at the deadline."""
        said = False
        while not self.broken and (left := deadline - time.monotonic()) > 0:
            if self.all_sent and not said:
                said = True
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
            _wait(self._socket, left, writing=not self.all_sent)
            self.read()
        self.close()


class Channel:
    """What one host says to another, over one connection after the other."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self._sent: list[bytes] = []
        self.have = 0
        """The number of the last message that has come."""
        self._spoken = False
        """Something has come over the present connection: the other end goes on over it, too."""

    def attach(self, connection: Connection, have: int) -> None:
        """Go on over another connection; the other end has the first `have` messages."""
        if self.connection is not None:
            self.connection.close()
        self.connection, self._spoken = connection, False
        for line in self._sent[have:]:
            connection.send(line)

    def send(self, message: Message) -> None:
        """Send a message, now or over a later connection."""
        self._sent.append(b"%d %s" % (len(self._sent) + 1, protocol.encode_message(message)))
        if self.connection is not None:
            self.connection.send(self._sent[-1])

    def beat(self, message: Message) -> None:
        """Send a message that is of no use later."""
        if self.connection is not None and self.connection.all_sent:
            self.connection.send(b"0 " + protocol.encode_message(message))

    def read(self) -> list[Message]:
        """The messages that have come since the last call."""
        if self.connection is None:
            return []
        messages = []
        for line in self.connection.read():
            self._spoken = True
            number, _, rest = line.partition(b" ")
            message = protocol.decode_message(rest) if number.isdigit() else None
            if message is None or 0 < int(number) <= self.have:
                continue
            self.have = max(self.have, int(number))
            messages.append(message)
        return messages

    @property
    def ended(self) -> bool:
        """The process at the other end is no more: it has closed what it had spoken over."""
        return self.connection is not None and self._spoken and self.connection.ended

    def close(self, *, deadline: float | None = None) -> None:
        """Close the connection; with a deadline (of `time.monotonic`) after what was said last."""
        if self.connection is not None:
            if deadline is not None:
                self.connection.close_after_last_words(deadline)
            self.connection.close()


class Listener:
    """Host 0's end: takes the connections of those that have the key."""

    def __init__(
        self,
        run: str,
        key: bytes,
        address: str,
        port: int,
        nodes: range,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens on this address alone. OSError if the port is taken."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server(
            (address, port), family=family, backlog=min(len(nodes) + 16, socket.SOMAXCONN)
        )
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._run = run
        self._key = key
        self._nodes = nodes
        self._clock = clock
        self._unknown: list[tuple[Connection, str, float]] = []

    def accept(self) -> list[tuple[int, Connection, int, str]]:
        """Those who have proved who they are: node rank, connection, what they have, a nonce.

        They wait for `welcome` with this nonce.
        """
        while True:
            try:
                end, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # too many files, or it was gone before it was taken
                log.warning("a connection was not taken: %s", error)
                break
            connection, nonce = Connection(end), os.urandom(16).hex()
            self._unknown.append((connection, nonce, self._clock()))
            connection.send(_line({"run": self._run, "nonce": nonce}))
            if len(self._unknown) > MOST_WAITING:
                self._unknown.pop(0)[0].close()
        known = []
        for entry in list(self._unknown):
            connection, nonce, since = entry
            lines = connection.read(MOST_UNKNOWN)
            if lines:
                self._unknown.remove(entry)
                if (proved := self._prove(lines[0], nonce)) is not None:
                    known.append((proved[0], connection, proved[1], proved[2]))
                else:
                    log.warning("refused: somebody without the run's key")
                    connection.close()
            elif (
                connection.broken
                or connection.read_bytes > MOST_UNKNOWN
                or self._clock() - since > PROVE_WITHIN
            ):
                self._unknown.remove(entry)
                connection.close()
        return known

    def _prove(self, line: bytes, nonce: str) -> tuple[int, int, str] | None:
        said = _parse(line)
        node, have, own = said.get("node_rank"), said.get("have"), said.get("nonce")
        if not isinstance(node, int) or not isinstance(have, int) or not isinstance(own, str):
            return None
        wanted = proof(self._key, str(node), self._run, nonce, own, have)
        if node not in self._nodes or have < 0:
            return None
        return (node, have, own) if _same(said.get("proof"), wanted) else None

    def welcome(self, connection: Connection, nonce: str, have: int) -> None:
        """Prove to one of them that this is host 0, and say what has come from it."""
        wanted = proof(self._key, "host 0", self._run, nonce, have)
        connection.send(_line({"proof": wanted, "have": have}))

    def close(self) -> None:
        self._socket.close()
        for connection, _, _ in self._unknown:
            connection.close()
        self._unknown.clear()


class Dialer:
    """Host k's end: connects to host 0 until it has proved itself, and again when it is asked."""

    def __init__(
        self,
        run: str,
        key: bytes,
        node_rank: int,
        own: str,
        leader: tuple[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own`: the address to connect from; `leader`: host 0's address and port."""
        self._run = run
        self._key = key
        self._node_rank = node_rank
        self._own = own
        self._leader = leader
        self._clock = clock
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._nonce = ""
        self._proved = False
        self._have = 0
        self._since = float("-inf")
        self.problem = ""
        """Why there is no connection, in the words of the system or of ours."""

    @property
    def proving(self) -> bool:
        """Host 0 may go on over this try at any moment."""
        return self._proved and self._connection is not None

    def step(self, have: int, give_up_after: float) -> tuple[Connection, int] | None:
        """Go on; a connection that is proved on both sides, with what host 0 has, if there is one.

        A try that takes longer than `give_up_after` seconds is ended, and another one begun.
        """
        now = self._clock()
        if self._socket is None and self._connection is None:
            if now - self._since >= RETRY:
                self._connect()
            return None
        if now - self._since > give_up_after:
            self._drop(self.problem or "nobody answers")
            return None
        if self._socket is not None:
            self._await_connection()
        return None if self._connection is None else self._prove(have)

    def _connect(self) -> None:
        self._since, self._proved = self._clock(), False
        family = socket.AF_INET6 if ":" in self._own else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.bind((self._own, 0))
            code = self._socket.connect_ex(self._leader)
        except OSError as error:
            self._drop(error.strerror or str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._drop(os.strerror(code))

    def _await_connection(self) -> None:
        assert self._socket is not None
        if not _wait(self._socket, 0.0, writing=True):
            return
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._drop(os.strerror(code))
            return
        self._connection, self._socket = Connection(self._socket), None

    def _prove(self, have: int) -> tuple[Connection, int] | None:
        assert self._connection is not None
        lines = self._connection.read()
        if not lines:
            if self._connection.broken:
                words = "it ended the connection (is the key the same?)" if self._proved else ""
                self._drop(words or self._connection.broken)
            return None
        said = _parse(lines[0])
        if not self._proved:
            if said.get("run") != self._run:
                self._drop(f"what listens there is not run {self._run}")
                return None
            self._proved, self._have = True, have
            self._nonce = os.urandom(16).hex()
            own = proof(
                self._key, str(self._node_rank), self._run, said.get("nonce"), self._nonce, have
            )
            answer = {"node_rank": self._node_rank, "nonce": self._nonce, "proof": own}
            self._connection.send(_line({**answer, "have": have}))
            return None
        theirs = said.get("have")
        if not isinstance(theirs, int) or not _same(
            said.get("proof"), proof(self._key, "host 0", self._run, self._nonce, theirs)
        ):
            self._drop("what listens there has not the run's key")
            return None
        connection, self._connection = self._connection, None
        connection.give_back(lines[1:])
        self.problem = ""
        return connection, theirs

    def _drop(self, problem: str) -> None:
        self.problem = problem
        for end in (self._socket, self._connection):
            if end is not None:
                end.close()
        self._socket = self._connection = None

    def close(self) -> None:
        self._drop(self.problem)


def _wait(end: socket.socket, seconds: float, *, writing: bool) -> bool:
    """Wait until there is something to read, or room to write. `select` has 1024 files at most."""
    poll = select.poll()
    poll.register(end, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values) + "\n").encode()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _same(said: object, wanted: str) -> bool:
    return isinstance(said, str) and hmac.compare_digest(said.encode(), wanted.encode())
