"""Messages between the kernel, the supervisor and the processes of a run: JSON lines over pipes.

    kernel       ──> supervisor    Preload, StartRun, StopRun
    supervisor   ──> kernel        Ready, RunFinished, Broken, Leaving
    supervisor   ──> fork server   ImportLibraries, ForkRunner
    supervisor   ──> kept prelude  ForkRunner
    fork server  ──> supervisor    LibrariesImported, ImportsFailed
    runner       ──> supervisor    RunnerForked, CellStarted, PreludeKept, PreludeNotForkable,
                                   PreludeNotKept, RanksForked, RankExited, StopRanks,
                                   AttemptReady, AttemptFinished, RunnerExits
    supervisor   ──> runner        StartAttempt, AbandonAttempt, AllFinished (several hosts)

Over an ssh pipe, with a run's supervisor at one end and `tpunb node` on a host at the other:

    supervisor   ──> node          StartNode, BeginRun, StartAttempt, AbandonAttempt, AllFinished,
                                   ShutDown, CollectStacks, Alive
    node         ──> supervisor    NodeHere, CellStarted, RanksForked, RankExited, StopRanks,
                                   AttemptReady, AttemptFinished, PreludeNotForkable, SignalSent,
                                   RunnerEnded, StacksCollected, Preempted, RankStates,
                                   FileGrown, FileReplaced, RunFinished

A line is {"kind": <class name>, <fields>}. Lines that are not messages are logged and skipped, so
the two ends may have different versions, and a login shell may greet. Standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from tpunb.runs.spec import Stop
from tpunb.utils import records
from tpunb.utils.files import LineBuffer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preload:
    """Start a fork server, which imports torch and torch_xla and waits for a run."""

    env: dict[str, str]
    """The complete environment of the fork server."""
    sys_path: list[str]
    processors: list[int]
    idle: float = 3600.0
    """Seconds without a run after which the supervisor ends; kept preludes end after half of it."""


@dataclass(frozen=True)
class StartNode:
    """Start this host's part of a run in a run folder; the first message to `tpunb node`."""

    dir: str
    env: dict[str, str]
    """Environment variables for the ranks in addition to the host's; as sent by `tpunb node` to
    its own supervisor, the complete environment. They may be secrets, so they are in no file."""
    node_rank: int
    address: str
    """The address at which other hosts reach this host."""
    port: int
    """The first of the ports at which host 0 may serve the ranks' store."""
    facts: dict[str, str] = field(default_factory=dict)
    """Properties that must be equal on all hosts, by name; `tpunb node` finds them out."""
    device: str | None = None
    """As in StartRun; `tpunb node` finds it out."""


@dataclass(frozen=True)
class NodeCommand:
    """How a supervisor reaches one of a run's hosts."""

    command: tuple[str, ...]
    """The command that runs `tpunb node` on the host, such as ssh."""
    start: StartNode


@dataclass(frozen=True)
class Pod:
    """The hosts of a run, in order of node rank, and the commands that copy its files."""

    nodes: tuple[NodeCommand, ...]
    send: tuple[str, ...]
    """The command that copies the files of the run to the hosts before it begins. If it fails, its
    output is a JSON list of problems: [name of the host or null, text]."""
    fetch: tuple[str, ...]
    """The command that copies large results from the hosts at the end; () if there are none."""


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
    pod: Pod | None = None
    """The run's hosts; None if it runs on this machine."""


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
    """The fork server has ended before a run could begin: this supervisor accepts no more runs."""

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
    """Leave a copy, and become the runner, which runs the prelude and forks the ranks.

    Sockets travel with it (`OrderChannel`), one for each copy: that one, then those that the runner
    may leave after its cells.
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
    """This host's node rank in a run on several hosts: then the runner leaves no copies after its
    cells, and the messages for all hosts come over its last socket."""
    address: str = ""
    """The address at which other hosts reach this host."""
    port: int = 0
    """The first of the ports at which host 0 may serve the ranks' store (`store_ports`)."""


def store_ports(port: int) -> range:
    """Return the ports for the ranks' store: host 0 serves it at the first that is free.

    They are few and known, so that a firewall can allow them.
    """
    return range(port, min(port + 5, 65536))


@dataclass(frozen=True)
class LibrariesImported:
    """The libraries are imported: the fork server now waits for a run."""

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
    """The process that was ordered to is the runner now, and has forked its copy."""

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
    """A process has left a copy of itself, which becomes the runner of a later run."""

    pid: int
    copy: int
    """The copy's number, by which the supervisor finds its end of the connection to it."""
    cells: int
    """The number of prelude cells that have run in it; 0 in a fork server."""
    seconds: float
    """The duration of the cells that ran after the previous copy."""
    modules: dict[str, list[Any]]
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
    memory: str = ""
    """Evidence that the kernel killed it because memory ran out, found by its supervisor; or ''."""


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


@dataclass(frozen=True)
class AllFinished:
    """All ranks of all hosts have reached the end of the train cell."""


@dataclass(frozen=True)
class NodeHere:
    """A host waits to begin: it is this run's turn on its device."""

    facts: dict[str, str]
    time: float
    """The time by the host's clock, as in RankStates."""


@dataclass(frozen=True)
class BeginRun:
    """All hosts are here and have equal facts: begin the prelude."""


@dataclass(frozen=True)
class ShutDown:
    """Begin the shutdown sequence of a host's processes, or skip the rest of its grace period."""

    grace: float
    """Seconds for the ranks to save; 0 also ends the grace period of a sequence that has begun."""
    of_attempt: bool = False
    """Only of this attempt: ranks of a later one live."""


@dataclass(frozen=True)
class SignalSent:
    """A step of the shutdown sequence has begun, with the name of its signal."""

    step: str
    time: float


@dataclass(frozen=True)
class RunnerEnded:
    """The runner has ended and will not be replaced, or the fork server before it forked one."""

    pid: int | None
    code: int
    """Negative for a signal."""
    time: float
    by_itself: bool
    """It has announced its end; otherwise it was killed, or the prelude has called os._exit."""
    ranks_forked: bool
    memory: str = ""
    """As in RankExited."""
    fork_server: bool = False
    output: str = ""
    """The end of the fork server's output."""
    imports_failed: ImportsFailed | None = None
    """The exception that ended the fork server."""


@dataclass(frozen=True)
class CollectStacks:
    """Have the ranks write their stacks."""


@dataclass(frozen=True)
class StacksCollected:
    """All stacks that can be expected are in the ranks' folders."""


@dataclass(frozen=True)
class Preempted:
    """The host is about to be shut down."""

    notice: str


@dataclass(frozen=True)
class RankState:
    """What a living rank does."""

    rank: int
    state: str
    """/proc's letter: R runs, S sleeps, D is uninterruptible, T is stopped; '' if ended."""
    seconds: float
    """Seconds of processor time so far, with its descendants."""
    bytes: int
    """Bytes read and written so far, with its descendants."""
    memory: int
    """Bytes in RAM."""


@dataclass(frozen=True)
class RankStates:
    """The ranks of a host; sent often, so that it is also the host's sign of life."""

    ranks: tuple[RankState, ...]
    time: float


@dataclass(frozen=True)
class FileGrown:
    """Bytes that were appended to a file of the host's run folder."""

    file: str
    """Its path in the run folder."""
    data: str
    """In base64, as in FileReplaced."""


@dataclass(frozen=True)
class FileReplaced:
    """The new content of a small file of the host's run folder."""

    file: str
    data: str


@dataclass(frozen=True)
class Alive:
    """The supervisor is still there: a connection that is cut does not close at its other end."""


Message = (
    Preload | StartRun | StopRun
    | Ready | RunFinished | Broken | Leaving
    | ImportLibraries | ForkRunner
    | LibrariesImported | ImportsFailed | RunnerForked | RunnerExits
    | CellStarted | PreludeKept | PreludeNotKept | PreludeNotForkable
    | RanksForked | RankExited | StopRanks
    | AttemptReady | AttemptFinished | StartAttempt | AbandonAttempt | AllFinished
    | StartNode | NodeHere | BeginRun | ShutDown | SignalSent | RunnerEnded
    | CollectStacks | StacksCollected | Preempted | RankStates | FileGrown | FileReplaced | Alive
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
        kind: Any = KINDS[values.pop("kind")]
        if not values.keys() <= records.hints(kind).keys():
            raise ValueError("fields that it does not have")
        return records.build(kind, values)  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("not a message (%s: %s): %.80r", type(error).__name__, error, line)
        return None


class MessageReader:
    """Reads messages from the end of a pipe."""

    def __init__(self, fd: int, longest: int | None = None) -> None:
        """`longest`: the most bytes of a line that are kept; longer ones are no messages."""
        self.fd = fd
        self.closed = False
        """True once the other end is closed and nothing more will come."""
        self._lines = LineBuffer(longest)

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


class Outbox:
    """Messages to a pipe whose reader may be slow: they wait here, and nothing blocks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting = bytearray()
        self.closed = False
        """True once the reader is gone: nothing more can be sent."""
        os.set_blocking(fd, False)

    @property
    def descriptor(self) -> int | None:
        """What can be written to again when nothing more could be; None if nothing waits."""
        return self._fd if self._waiting else None

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return len(self._waiting)

    def send(self, message: Message) -> None:
        """Write a message, at once or later. Once the reader is gone, it is dropped."""
        if not self.closed:
            self._waiting += encode_message(message)
            self.flush()

    def flush(self) -> None:
        """Write as much as the pipe takes now."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
            self._waiting.clear()

    def drain(self, seconds: float) -> None:
        """Wait until everything is written, or for so many seconds."""
        poll, end = select.poll(), time.monotonic() + seconds
        poll.register(self._fd, select.POLLOUT)
        while self._waiting and time.monotonic() < end:
            poll.poll(100)
            self.flush()


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
