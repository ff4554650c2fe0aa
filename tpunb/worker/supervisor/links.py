"""Connections between the supervisors of a run's hosts: authenticated, and replaced when lost.

    host k (Dialer)                                  host 0 (Listener)
    connect, every RETRY seconds until accepted  ──>
                                                 <── {"run", "nonce"}
      another run: close, connect again
    {"node_rank", "nonce", "proof", "have"}      ──>
                                                       wrong, or later than PROVE_WITHIN: close
                                                 <── {"proof", "have"}
      wrong: close, connect again
    Channel <── numbered messages (tpunb.runs.protocol), first those that were missed ──> Channel
      silence: Dialer connects again, and both Channels attach to the new connection

A proof is an HMAC of both nonces with the run's key: the key itself is never sent, and an
intercepted proof is useless. `have` is the number of the last message received; later ones are sent
again, so no message is lost or handled twice when a connection is replaced. Host k replaces a
silent connection because TCP itself, after a long break, waits as long again before it retries.
Heartbeats have the number 0 and are never sent again.

Until a proof is verified, the other end may be any program: its lines are bounded, and parsed by
`_parse` alone, which raises nothing.

The supervisor calls these classes in its loop; only `close` with a deadline waits.
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import math
import os
import resource
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tpunb.runs import protocol
from tpunb.runs.protocol import Message
from tpunb.utils import records
from tpunb.utils.files import LineBuffer

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_UNKNOWN = 4096
"""Bytes read from a connection before it has proved anything."""
MOST_WAITING = 256
"""Connections that have proved nothing yet; the oldest one is closed for a new one.

At most a quarter of the files that this process may open, so that it can still open others.
"""
PROVE_WITHIN = 10.0
"""Seconds that a connection has for its proof."""
RETRY = 0.5
"""Seconds between two attempts to connect."""
FAREWELL = 2.0
"""Seconds that the last messages have to be delivered before a connection is closed."""


@dataclass(frozen=True)
class _Greeting:
    """Host 0's first line."""

    run: str
    nonce: str


@dataclass(frozen=True)
class _Claim:
    """The first line of another host."""

    node_rank: int
    nonce: str
    have: int
    proof: str


@dataclass(frozen=True)
class _Welcome:
    """Host 0's second line."""

    have: int
    proof: str


def proof(key: bytes, who: str, run: str, *parts: object) -> str:
    """The proof that `who` ('host 0', or a node rank) has the key, in hexadecimal digits."""
    text = json.dumps([who, run, *parts]).encode()
    return hmac.new(key, text, "sha256").hexdigest()


class Connection:
    """A non-blocking socket that sends and receives lines."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = end
        self._out = bytearray()
        self._lines = LineBuffer()
        self._early: list[bytes] = []
        self.read_bytes = 0
        self.ended = False
        """The process at the other end has closed the connection, or is gone."""
        self.broken = ""
        """Why nothing more can be sent or received; empty while it can."""

    def send(self, line: bytes) -> None:
        """Send a line, as much as fits into the buffer; `flush` and `read` send the rest."""
        self._out += line
        self.flush()

    def flush(self) -> None:
        """Send what did not fit into the buffer before."""
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
        """Return the lines received; read at most `most` bytes (and one) over the whole life."""
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

    def read_unproved(self) -> list[bytes]:
        """Return the lines of an end that has proved nothing; one that is too long is cut."""
        lines = self.read(MOST_UNKNOWN)
        return [b""] if not lines and self.read_bytes > MOST_UNKNOWN else lines

    def give_back(self, lines: list[bytes]) -> None:
        """Have the next `read` return these lines again."""
        self._early = lines + self._early

    def _fail(self, error: OSError) -> None:
        # A reset comes from a machine that is reachable and does not know this connection.
        self.ended = error.errno in (errno.ECONNRESET, errno.EPIPE)
        self.broken = error.strerror or str(error)

    def close(self) -> None:
        self._socket.close()
        self.broken = self.broken or "closed by this host"

    def close_after_sending(self, deadline: float) -> None:
        """Close once everything was sent and the other end has read it, or at the deadline."""
        shut = False
        while not self.broken and (left := deadline - time.monotonic()) > 0:
            if self.all_sent and not shut:
                shut = True
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
            _wait(self._socket, left, writing=not self.all_sent)
            self.read()
        self.close()


class Channel:
    """The messages between two hosts, over one connection after the other."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self._sent: list[bytes] = []
        self.have = 0
        """The number of the last message received."""
        self._confirmed = False
        """Something was received over the current connection: the other end uses it, too."""

    def attach(self, connection: Connection, have: int) -> None:
        """Switch to another connection; the other end has the first `have` messages."""
        if self.connection is not None:
            self.connection.close()
        self.connection, self._confirmed = connection, False
        for line in self._sent[have:]:
            connection.send(line)

    def send(self, message: Message) -> None:
        """Send a message, now or over a later connection."""
        self._sent.append(b"%d %s" % (len(self._sent) + 1, protocol.encode_message(message)))
        if self.connection is not None:
            self.connection.send(self._sent[-1])

    def beat(self, message: Message) -> None:
        """Send a message that is useless later: it is never repeated."""
        if self.connection is not None and self.connection.all_sent:
            self.connection.send(b"0 " + protocol.encode_message(message))

    def read(self) -> list[Message]:
        """Return the messages received since the last call."""
        if self.connection is None:
            return []
        messages = []
        for line in self.connection.read():
            self._confirmed = True
            number, _, rest = line.partition(b" ")
            known = number.isdigit() and len(number) < 19  # int refuses thousands of digits
            message = protocol.decode_message(rest) if known else None
            if message is None or 0 < int(number) <= self.have:
                continue
            self.have = max(self.have, int(number))
            messages.append(message)
        return messages

    @property
    def ended(self) -> bool:
        """True if the process at the other end is gone: it has closed the connection it used."""
        return self.connection is not None and self._confirmed and self.connection.ended

    def close(self, *, deadline: float | None = None) -> None:
        """Close the connection; with a deadline (of `time.monotonic`), send everything first."""
        if self.connection is not None:
            if deadline is not None:
                self.connection.close_after_sending(deadline)
            self.connection.close()


class Listener:
    """Host 0's end: accepts the connections of hosts that have the run's key."""

    def __init__(
        self,
        run: str,
        key: bytes,
        address: str,
        port: int,
        nodes: range,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen on this address alone. Raises OSError if the port is taken."""
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
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # below 0: any number
        self._most = MOST_WAITING if files < 0 else max(1, min(MOST_WAITING, files // 4))
        self._warned: Counter[str] = Counter()

    def accept(self) -> list[tuple[int, Connection, int, str]]:
        """Return the newly proved connections: node rank, connection, messages received, nonce.

        The hosts at their other ends wait for `welcome` with this nonce.
        """
        for _ in range(self._most):  # not all: a program may connect faster than this accepts
            try:
                end, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # too many files, or it was closed before it was accepted
                self._warn(f"a connection could not be accepted: {error}")
                break
            connection, nonce = Connection(end), os.urandom(16).hex()
            self._unknown.append((connection, nonce, self._clock()))
            connection.send(_line(_Greeting(self._run, nonce)))
            if len(self._unknown) > self._most:
                self._unknown.pop(0)[0].close()
        known = []
        for entry in list(self._unknown):
            connection, nonce, since = entry
            if lines := connection.read_unproved():
                self._unknown.remove(entry)
                if (claim := self._prove(lines[0], nonce)) is not None:
                    known.append((claim.node_rank, connection, claim.have, claim.nonce))
                else:
                    self._warn("refused a connection without the run's key")
                    connection.close()
            elif connection.broken or self._clock() - since > PROVE_WITHIN:
                self._unknown.remove(entry)
                connection.close()
        return known

    def _prove(self, line: bytes, nonce: str) -> _Claim | None:
        claim = _parse(_Claim, line)
        if claim is None or claim.node_rank not in self._nodes or claim.have < 0:
            return None
        node = str(claim.node_rank)
        wanted = proof(self._key, node, self._run, nonce, claim.nonce, claim.have)
        return claim if _same(claim.proof, wanted) else None

    def _warn(self, problem: str) -> None:
        """Log a problem the first, second, fourth, eighth … time: strangers fill no disk."""
        self._warned[problem] += 1
        if (times := self._warned[problem]).bit_count() == 1:
            log.warning("%s (%d so far)", problem, times)

    def welcome(self, connection: Connection, nonce: str, have: int) -> None:
        """Prove to an accepted host that this is host 0, and send which messages were received."""
        wanted = proof(self._key, "host 0", self._run, nonce, have)
        connection.send(_line(_Welcome(have, wanted)))

    def close(self) -> None:
        self._socket.close()
        for connection, _, _ in self._unknown:
            connection.close()
        self._unknown.clear()


class Dialer:
    """Host k's end: connects until host 0 has proved itself, and again on request."""

    def __init__(
        self,
        run: str,
        key: bytes,
        node_rank: int,
        own: str,
        leader: tuple[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect from the address `own` to `leader`, host 0's address and port."""
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
        self._since = float("-inf")
        self.problem = ""
        """Why there is no connection: the system's error message, or one of this class."""

    @property
    def proving(self) -> bool:
        """True if host 0 may switch to this connection at any moment."""
        return self._proved and self._connection is not None

    def step(self, have: int, give_up_after: float) -> tuple[Connection, int] | None:
        """Make progress; return a connection proved on both sides and how many messages host 0 has.

        None while there is none. An attempt that takes longer than `give_up_after` seconds is
        dropped, and another one begun.
        """
        now = self._clock()
        if self._socket is None and self._connection is None:
            if now - self._since >= RETRY:
                self._connect()
            return None
        if now - self._since > give_up_after:
            self._drop(self.problem or "no answer")
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
        lines = self._connection.read_unproved()
        if not lines:
            if self._connection.broken:
                refused = "host 0 closed the connection (is the key the same?)"
                self._drop(refused if self._proved else self._connection.broken)
            return None
        if not self._proved:
            greeting = _parse(_Greeting, lines[0])
            if greeting is None or greeting.run != self._run:
                self._drop(f"another program listens there, not run {self._run}")
                return None
            self._proved = True
            self._nonce = os.urandom(16).hex()
            node = str(self._node_rank)
            own = proof(self._key, node, self._run, greeting.nonce, self._nonce, have)
            self._connection.send(_line(_Claim(self._node_rank, self._nonce, have, own)))
            return None
        welcome = _parse(_Welcome, lines[0])
        if welcome is None or not _same(
            welcome.proof, proof(self._key, "host 0", self._run, self._nonce, welcome.have)
        ):
            self._drop("the program that listens there does not have the run's key")
            return None
        connection, self._connection = self._connection, None
        connection.give_back(lines[1:])
        self.problem = ""
        return connection, welcome.have

    def _drop(self, problem: str) -> None:
        self.problem = problem
        for end in (self._socket, self._connection):
            if end is not None:
                end.close()
        self._socket = self._connection = None

    def close(self) -> None:
        self._drop(self.problem)


def _wait(end: socket.socket, seconds: float, *, writing: bool) -> bool:
    """Wait until there is data to read, or room to write. Not with `select`: 1024 files at most."""
    poll = select.poll()
    poll.register(end, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _line(record: Any) -> bytes:
    return (json.dumps(asdict(record)) + "\n").encode()


def _parse(kind: type[T], line: bytes) -> T | None:
    """Return the record on a line that any program may have sent; None if it is something else."""
    try:
        return records.build(kind, records.parse(line))
    except ValueError:
        return None


def _same(given: str, wanted: str) -> bool:
    # As bytes, because compare_digest takes no other characters than ASCII.
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
