"""Messages between the kernel, the supervisor and the processes of a run: JSON lines over pipes.

    kernel       ──> supervisor    Preload, StartRun, StopRun, JoinHosts (before StartRun)
    supervisor   ──> kernel        Ready, RunFinished, Broken, Leaving
    supervisor   ──> fork server   ImportLibraries, ForkRunner
    supervisor   ──> kept prelude  ForkRunner
    fork server  ──> supervisor    LibrariesImported, ImportsFailed
    runner       ──> supervisor    RunnerForked, CellStarted, PreludeKept, PreludeNotForkable,
                                   PreludeNotKept, RanksForked, RankExited, StopRanks,
                                   AttemptReady, AttemptFinished, RunnerExits
    supervisor   ──> runner        StartAttempt, AbandonAttempt, AllFinished (several hosts)

Between the supervisors of a run's hosts, over TCP (tpunb.worker.supervisor.hosts):

    host k       ──> host 0        HostHere, AttemptReady, AttemptFinished, AttemptFailed,
                                   Stop, HostEnded, Beat
    host 0       ──> every host    AllHere, StartAttempt, AbandonAttempt, AllFinished, Stop,
                                   RefuseRun, HostLost, RunOver, Beat

A line is {"kind": <class name>, <fields>}. Lines that are not messages are logged and skipped, so
the two ends may have different versions. Standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from tpunb.runs.spec import Stop
from tpunb.utils import records
from tpunb.utils.files import LineBuffer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preload:
    """Start a fork server, which imports torch and torch_xla and waits."""

    env: dict[str, str]
    """The complete environment of the fork server."""
    sys_path: list[str]
    processors: list[int]
    idle: float = 3600.0
    """Seconds without a run after which the supervisor ends; kept preludes end after half of it."""


@dataclass(frozen=True)
class StartRun:
    """Start the run in a run folder, after the runs that were ordered before it."""

    dir: str
    env: dict[str, str]
    device: str | None = None
    """The name of a device that one run of this user at a time may use on this machine; or None."""
    detached: bool = False
    """The run outlives the kernel; the supervisor ends with it."""
    ahead: bool = False
    """Only the prelude runs, at low priority and until another run is ordered, for later runs to
    begin in. The supervisor removes the folder at the end, and sends nothing to the kernel."""


@dataclass(frozen=True)
class JoinHosts:
    """Join the other hosts of the run in this folder."""

    dir: str
    node_rank: int
    address: str
    """The address at which other hosts reach this host; it listens on no other."""
    leader: str
    """The address of host 0, which listens for the other hosts."""
    port: int
    key: str
    """The key of the run: hosts prove to each other that they have it."""
    facts: dict[str, str]
    """Properties that must be equal on all hosts, by name."""
    beat: float = 2.0
    """As in `runs.stream.Start`, like the next two."""
    lost_after: float = 20.0
    patience: float = 300.0


@dataclass(frozen=True)
class StopRun:
    """Begin the shutdown sequence of a run."""

    dir: str
    stop: Stop


@dataclass(frozen=True)
class Ready:
    """The fork server has imported everything and waits."""


@dataclass(frozen=True)
class RunFinished:
    """No process of the run is left, and its `result.json` is written."""

    dir: str


@dataclass(frozen=True)
class Broken:
    """The fork server has ended unexpectedly: this supervisor accepts no more runs."""

    code: int
    output: str


@dataclass(frozen=True)
class Leaving:
    """The supervisor ends its run and then itself: it accepts no more runs."""

    reason: str


@dataclass(frozen=True)
class ImportLibraries:
    """Import torch and torch_xla; the fork server's first order."""

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
    """Why every rank runs the prelude itself; None if the runner runs it once."""
    first_copy: int = 0
    """The number of the first copy; numbers are unique in the life of a supervisor."""
    ahead: bool = False
    """Run the prelude at low priority, then end."""
    node_rank: int | None = None
    """This host's node rank in a run on several hosts: then the runner leaves no copies, and the
    messages for all hosts come over its socket."""
    address: str = ""
    """The address at which other hosts reach this host."""
    port: int = 0
    """The port at which host 0's supervisor listens for the others; `store_ports` follow it."""


def store_ports(port: int) -> range:
    """Return the ports for the ranks' store: host 0 serves it at the first that is free.

    They follow the port at which its supervisor listens, so that a firewall can allow them.
    """
    return range(port + 1, min(port + 5, 65536))


@dataclass(frozen=True)
class LibrariesImported:
    """The libraries are imported: the fork server now forks runners."""

    variables: dict[str, list[str]]
    """Environment variables that the imports have set, as they do in the kernel: the values before
    (if there was one) and after."""


@dataclass(frozen=True)
class ImportsFailed:
    """The fork server ends: it could not import the libraries, or set up the device."""

    type: str
    """The exception's class name."""
    message: str
    of_tpunb: bool
    """True for an error of tpunb: its message names the cause and the fix."""


@dataclass(frozen=True)
class RunnerForked:
    pid: int


@dataclass(frozen=True)
class RunnerExits:
    """The runner is about to end on its own. One that ends without this message was killed."""

    code: int


@dataclass(frozen=True)
class CellStarted:
    """A cell of the prelude has started."""

    number: int | None


@dataclass(frozen=True)
class PreludeKept:
    """The runner has left a copy of itself, from which later runs can be forked."""

    pid: int
    copy: int
    """The copy's number, by which the supervisor finds its end of the connection to it."""
    cells: int
    """The number of prelude cells that have run in it."""
    seconds: float
    """The duration of the cells that ran after the previous copy."""
    modules: dict[str, list[int]]
    """Imported files outside of packages: their times of change in nanoseconds and sizes."""
    folders: list[str]
    """Temporary folders that its cells have made and that ranks may remove when they end."""


@dataclass(frozen=True)
class PreludeNotKept:
    """From some cell on, later runs cannot be forked from this prelude."""

    reason: str


@dataclass(frozen=True)
class PreludeNotForkable:
    """The prelude did something after which forks are not safe; the runner ends."""

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
    """Its peak memory in bytes."""
    finished: bool
    """True if its train cell has completed; otherwise the rank has failed, whatever its code."""


@dataclass(frozen=True)
class StopRanks:
    """torch elastic has detected a failed rank and requests that the others be ended."""


@dataclass(frozen=True)
class AttemptReady:
    """This host is prepared for an attempt: its ranks can be forked."""

    attempt: int
    port: int
    """The port of the store that host 0 serves for ranks; 0 from other hosts."""


@dataclass(frozen=True)
class AttemptFinished:
    """All ranks of this host have reached the end of the train cell."""

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
    """The port of the store that host 0 serves for ranks."""


@dataclass(frozen=True)
class AbandonAttempt:
    """A rank of some host has failed: end this attempt's ranks."""

    attempt: int
    reason: str


@dataclass(frozen=True)
class AllFinished:
    """All ranks of all hosts have reached the end of the train cell."""


@dataclass(frozen=True)
class HostHere:
    """A host has connected and is ready to begin."""

    facts: dict[str, str]


@dataclass(frozen=True)
class AllHere:
    """All hosts have connected and have equal facts: the prelude may begin."""


@dataclass(frozen=True)
class RefuseRun:
    """The run is refused: nothing is started."""

    reason: str


@dataclass(frozen=True)
class HostLost:
    """A host was lost or never connected: the others end their ranks."""

    node_rank: int
    reason: str
    time: float


@dataclass(frozen=True)
class HostEnded:
    """No process of the run is left on this host."""

    result: dict[str, Any]
    """The JSON of a `RunResult` of this host's ranks."""
    now: float
    """The time of this host's clock."""
    models: list[Any] = field(default_factory=list)
    """The JSON of the models that its first rank ended with (`tpunb.runs.trained_models`)."""


@dataclass(frozen=True)
class RunOver:
    """No process of the run is left on any host."""

    result: dict[str, Any]
    """The JSON of the `RunResult` of the whole run."""


@dataclass(frozen=True)
class Beat:
    """A heartbeat. `idle`: there was no activity for the time after which a run counts as hung."""

    idle: bool = False


Message = (
    Preload | StartRun | StopRun | JoinHosts
    | Ready | RunFinished | Broken | Leaving
    | ImportLibraries | ForkRunner
    | LibrariesImported | ImportsFailed | RunnerForked | RunnerExits
    | CellStarted | PreludeKept | PreludeNotKept | PreludeNotForkable
    | RanksForked | RankExited | StopRanks
    | AttemptReady | AttemptFinished | AttemptFailed | StartAttempt | AbandonAttempt | AllFinished
    | HostHere | AllHere | RefuseRun | Stop | HostLost | HostEnded | RunOver | Beat
)  # fmt: skip
KINDS: Mapping[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


IMPORT_FILES = "tpunb-{}-"
"""The beginning of the name of a supervisor's folder for temporary files, for its pid."""
MOST_SOCKETS = 64
"""The most sockets sent with one message. Linux allows 253."""


def encode_message(message: Message) -> bytes:
    """Return a message as a line, with its newline."""
    return (json.dumps({"kind": type(message).__name__, **asdict(message)}) + "\n").encode()


def decode_message(line: bytes) -> Message | None:
    """Return the message on a line; if it is not a message, log it and return None."""
    try:
        values: dict[str, Any] = records.parse(line)
        kind = KINDS[values.pop("kind")]
        return kind(**{name: _checked(kind, name, value) for name, value in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("not a message (%s: %s): %.80r", type(error).__name__, error, line)
        return None


def _checked(kind: type[Message], name: str, value: Any) -> Any:
    """Return a field's value. Raises KeyError, TypeError or ValueError if its type is wrong."""
    wanted = get_type_hints(kind)[name]
    union = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    types = tuple(get_origin(member) or member for member in union)
    if is_dataclass(types[0]) or issubclass(types[0], Enum):
        return records.convert(wanted, value)
    if not isinstance(value, types):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


class MessageReader:
    """Reads messages from the end of a pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        """True once the other end is closed and nothing more will come."""
        self._lines = LineBuffer()

    def read(self) -> list[Message]:
        """Return the messages that have arrived; [] if there are none on a non-blocking pipe."""
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
        """Close the pipe in a rank, whose code sends nothing to the supervisor."""
        os.close(self._fd)


class OrderChannel:
    """One end of a connection for orders, which may carry sockets.

    The supervisor holds one end and a process that waits for orders the other; the connection
    also shows each that the other has ended.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lines = LineBuffer()
        self._waiting: list[bytes] = []
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, sockets: Sequence[socket.socket] = ()) -> None:
        """Send an order. Raises OSError if the other end is closed."""
        data = encode_message(message)
        sent = socket.send_fds(self._socket, [data], [each.fileno() for each in sockets])
        self._socket.sendall(data[sent:])

    @property
    def waiting(self) -> bool:
        """True if an order was read from the socket but not received yet."""
        return bool(self._waiting)

    def receive(self) -> tuple[Message, list[socket.socket]] | None:
        """Wait for an order and its sockets; return None once the other end is closed."""
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
