"""Messages between the kernel, the supervisor and the processes of a run: JSON lines over pipes.

    kernel       ──> supervisor    Preload, StartRun, StopRun, JoinHosts (before StartRun)
    supervisor   ──> kernel        Ready, RunFinished, Broken, Leaving
    supervisor   ──> fork server   ImportLibraries, ForkRunner
    supervisor   ──> kept prelude  ForkRunner
    fork server  ──> supervisor    LibrariesImported
    runner       ──> supervisor    RunnerForked, CellStarted, PreludeKept, PreludeNotForkable,
                                   PreludeNotKept, RanksForked, RankExited, StopRanks,
                                   AttemptReady, AttemptFinished, RunnerExits
    supervisor   ──> runner        StartAttempt, AbandonAttempt, AllFinished (several hosts)

Between the supervisors of a run's hosts, over TCP (tpunb.worker.supervisor.hosts):

    host k       ──> host 0        HostHere, AttemptReady, AttemptFinished, AttemptFailed,
                                   StopHosts, HostEnded, Beat
    host 0       ──> every host    AllHere, StartAttempt, AbandonAttempt, AllFinished, StopHosts,
                                   RefuseRun, HostLost, RunOver, Beat

A line is {"kind": <class name>, <fields>}. What is no message is logged and left out: neither end
depends on the other being of the same version. Standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from tpunb.runs.spec import StopCause, StopOrigin
from tpunb.utils.files import LineBuffer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preload:
    """Start a fork server, which imports torch and torch_xla and waits."""

    env: dict[str, str]
    """Its whole environment."""
    sys_path: list[str]
    processors: list[int]
    idle: float = 3600.0
    """Seconds without a run after which the supervisor ends; kept preludes end at half of it."""


@dataclass(frozen=True)
class StartRun:
    """Run what is in a run folder, after the runs that were ordered before it."""

    dir: str
    env: dict[str, str]
    device: str | None = None
    """Names what only one run of this user on this machine may use; None: nothing."""
    detached: bool = False
    """The run outlives the kernel; the supervisor ends with it."""
    ahead: bool = False
    """Only the prelude runs, for later runs to begin in: at low priority, until another run comes.
    The supervisor removes the folder at its end, and says nothing to the kernel."""


@dataclass(frozen=True)
class JoinHosts:
    """The run in this folder is on several hosts, of which this supervisor's is one."""

    dir: str
    node_rank: int
    address: str
    """This host's, as the others reach it; nothing listens on any other."""
    leader: str
    """Host 0's, which listens for the others."""
    port: int
    key: str
    """Of the run: hosts prove to each other that they have it."""
    facts: dict[str, str]
    """What must be the same on all hosts."""
    beat: float = 2.0
    """Seconds between two heartbeats."""
    lost_after: float = 20.0
    """Seconds without one after which a host is lost."""
    patience: float = 300.0
    """Seconds that hosts wait for each other before the run begins."""


@dataclass(frozen=True)
class StopRun:
    """Begin the shutdown sequence of a run."""

    dir: str
    cause: StopCause
    reason: str
    origin: StopOrigin | None = None
    now: bool = False
    """Skip the grace period, or what is left of it."""


@dataclass(frozen=True)
class Ready:
    """The fork server has imported everything and waits."""


@dataclass(frozen=True)
class RunFinished:
    """None of the run's processes is left, and its `result.json` is written."""

    dir: str


@dataclass(frozen=True)
class Broken:
    """The fork server has ended by itself: this supervisor takes no more runs."""

    code: int
    output: str


@dataclass(frozen=True)
class Leaving:
    """The supervisor ends its run and then itself: it takes no other."""

    reason: str


@dataclass(frozen=True)
class ImportLibraries:
    """The fork server's first order."""

    sys_path: list[str]
    tmp: str
    """The folder for temporary files made while importing."""


@dataclass(frozen=True)
class ForkRunner:
    """Fork the process that runs the prelude and forks the ranks.

    Sockets travel with it (`OrderChannel`), one for each copy of itself that the runner may leave.
    """

    dir: str
    env: dict[str, str]
    replicate: str | None
    """Why every rank runs the prelude itself; None: the runner does, once."""
    first_copy: int = 0
    """The number of the first of these copies; those of a supervisor's life have one each."""
    ahead: bool = False
    """Run the prelude at low priority, and end."""
    node_rank: int | None = None
    """Which of several hosts this is: then no copy is left, and what all do comes on the socket."""
    address: str = ""
    """By which the other hosts reach this one."""
    port: int = 0
    """At which host 0's supervisor listens for the others; `store_ports` follow."""


def store_ports(port: int) -> range:
    """Where host 0 serves the ranks' store: at the first of these that is free.

    They come after the one at which its supervisor listens, so that a firewall can know them.
    """
    return range(port + 1, min(port + 5, 65536))


@dataclass(frozen=True)
class LibrariesImported:
    """From here on the fork server forks runners."""

    variables: dict[str, list[str]]
    """What importing them has set in the environment, as it does in the kernel: the values, before
    if there was one, and after."""


@dataclass(frozen=True)
class RunnerForked:
    pid: int


@dataclass(frozen=True)
class RunnerExits:
    """The runner is about to end by itself. One that ends without this has been ended."""

    code: int


@dataclass(frozen=True)
class CellStarted:
    """A cell of the prelude."""

    number: int | None


@dataclass(frozen=True)
class PreludeKept:
    """The runner has left a copy of itself, which later runs can be forked from."""

    pid: int
    copy: int
    """Its number, by which the supervisor finds its own end of the connection to it."""
    cells: int
    """How many cells of the prelude have run in it."""
    seconds: float
    """How long those took that ran since the copy before."""
    modules: dict[str, list[int]]
    """The imported files that are no package's: time of change in nanoseconds, and size."""
    folders: list[str]
    """Temporary folders that its cells have made, and that ranks may remove at their end."""


@dataclass(frozen=True)
class PreludeNotKept:
    """Later runs cannot be forked from this prelude from some cell on."""

    reason: str


@dataclass(frozen=True)
class PreludeNotForkable:
    """The prelude did what forbids a fork after it; the runner ends."""

    reason: str


@dataclass(frozen=True)
class RanksForked:
    attempt: int
    pids: list[int]
    """In order of rank."""


@dataclass(frozen=True)
class RankExited:
    rank: int
    code: int
    """Negative for a signal, as in subprocess."""
    time: float
    peak: int
    """The most memory that it held at once, in bytes."""
    finished: bool
    """Whether its train cell has ended well; without that it has failed, whatever its code."""


@dataclass(frozen=True)
class StopRanks:
    """Torch elastic has seen a failed rank and wants the others ended."""


@dataclass(frozen=True)
class AttemptReady:
    """All that comes before an attempt is done on this host: its ranks can be forked."""

    attempt: int
    port: int
    """Of the store that host 0 serves for ranks; 0 from other hosts."""


@dataclass(frozen=True)
class AttemptFinished:
    """All ranks of this host have come to the end of the train cell."""

    attempt: int


@dataclass(frozen=True)
class AttemptFailed:
    """A rank of this host has failed."""

    attempt: int
    reason: str
    """'rank h1/3 has failed'."""


@dataclass(frozen=True)
class StartAttempt:
    """All hosts are ready: fork the ranks."""

    attempt: int
    address: str
    port: int
    """Where ranks find the store that host 0 serves for them."""


@dataclass(frozen=True)
class AbandonAttempt:
    """A rank somewhere has failed: end this attempt's ranks."""

    attempt: int
    reason: str


@dataclass(frozen=True)
class AllFinished:
    """All ranks of all hosts have come to the end of the train cell."""


@dataclass(frozen=True)
class HostHere:
    """A host is there, and can begin."""

    facts: dict[str, str]


@dataclass(frozen=True)
class AllHere:
    """All hosts are there, and alike: the prelude may begin."""


@dataclass(frozen=True)
class RefuseRun:
    """Nothing is started."""

    reason: str


@dataclass(frozen=True)
class StopHosts:
    """Begin the shutdown sequence on all hosts."""

    cause: StopCause
    reason: str
    origin: StopOrigin | None = None
    now: bool = False


@dataclass(frozen=True)
class HostLost:
    """A host is gone, or has not come: the others end their ranks."""

    node_rank: int
    reason: str
    time: float


@dataclass(frozen=True)
class HostEnded:
    """No process of the run is left on this host."""

    result: dict[str, Any]
    """How it ended there: a `RunResult` of its ranks alone."""
    now: float
    """This host's clock."""


@dataclass(frozen=True)
class RunOver:
    """No process is left anywhere."""

    result: dict[str, Any]
    """That of the whole run."""


@dataclass(frozen=True)
class Beat:
    """Still there. `idle`: without activity for as long as makes a run count as hung."""

    idle: bool = False


Message = (
    Preload | StartRun | StopRun | JoinHosts
    | Ready | RunFinished | Broken | Leaving
    | ImportLibraries | ForkRunner
    | LibrariesImported | RunnerForked | RunnerExits
    | CellStarted | PreludeKept | PreludeNotKept | PreludeNotForkable
    | RanksForked | RankExited | StopRanks
    | AttemptReady | AttemptFinished | AttemptFailed | StartAttempt | AbandonAttempt | AllFinished
    | HostHere | AllHere | RefuseRun | StopHosts | HostLost | HostEnded | RunOver | Beat
)  # fmt: skip
KINDS: Mapping[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


IMPORT_FILES = "tpunb-{}-"
"""How the name of a supervisor's folder for temporary files begins, with its pid."""
MOST_SOCKETS = 64
"""With one message. Linux takes 253."""


def encode_message(message: Message) -> bytes:
    """A message as a line, with its newline."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    return (json.dumps({"kind": type(message).__name__, **values}) + "\n").encode()


def decode_message(line: bytes) -> Message | None:
    """The message on a line; None, and a line in the log, if it is none."""
    try:
        values: dict[str, Any] = json.loads(line)
        kind = KINDS[values.pop("kind")]
        return kind(**{name: _checked(kind, name, value) for name, value in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("not a message (%s: %s): %.80r", type(error).__name__, error, line)
        return None


def _checked(kind: type[Message], name: str, value: Any) -> Any:
    """The value of a field; KeyError, TypeError or ValueError if it is not of the field's type."""
    wanted = get_type_hints(kind)[name]
    union = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    types = tuple(get_origin(member) or member for member in union)
    if value is not None and issubclass(types[0], Enum):
        return types[0](value)
    if not isinstance(value, types):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


class MessageReader:
    """Reads messages from the end of a pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        """Whether the other end is: nothing more will come."""
        self._lines = LineBuffer()

    def read(self) -> list[Message]:
        """What has come. [] if nothing has, where the pipe does not block."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return []
        self.closed = not data
        lines = self._lines.feed(data)
        return [message for line in lines if (message := decode_message(line)) is not None]


class MessageWriter:
    """Writes messages to a pipe. Lines are short, so that several writers never mix."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_inheritable(fd, False)

    def send(self, message: Message) -> None:
        os.write(self._fd, encode_message(message))

    def close(self) -> None:
        """In a rank: the user's code has nothing to say to the supervisor."""
        os.close(self._fd)


class OrderChannel:
    """One end of a connection on which orders go, with sockets if need be.

    The supervisor holds one end, a process that waits for orders the other, and each finds out by
    it that the other has ended.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lines = LineBuffer()
        self._waiting: list[bytes] = []
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, sockets: Sequence[socket.socket] = ()) -> None:
        """Send an order. OSError if the other end has gone."""
        data = encode_message(message)
        sent = socket.send_fds(self._socket, [data], [each.fileno() for each in sockets])
        self._socket.sendall(data[sent:])

    @property
    def waiting(self) -> bool:
        """Whether an order has been read already that nobody has received."""
        return bool(self._waiting)

    def receive(self) -> tuple[Message, list[socket.socket]] | None:
        """Wait for an order, with its sockets; None once the other end has gone."""
        while True:
            while self._waiting:
                message = decode_message(self._waiting.pop(0))
                if message is not None:
                    sockets = [socket.socket(fileno=fd) for fd in self._fds]
                    self._fds = []
                    return message, sockets
            data, fds, _, _ = socket.recv_fds(
                self._socket, 1 << 16, MOST_SOCKETS, socket.MSG_CMSG_CLOEXEC
            )
            self._fds += fds
            if not data:
                return None
            self._waiting += self._lines.feed(data)

    def close(self) -> None:
        self._socket.close()
