"""The specification of a run (`spec.json`), and the enums that all parts of a run share.

Standard library only, because the supervisor, the fork server and the ranks import it. The values
of the enums are stored in the JSON files of run folders, so they must not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from tpunb.utils import records
from tpunb.utils.text import name_ranks

Role = Literal["header", "prelude", "parameters", "train"]
Device = Literal["TPU", "CPU", "GPU"]
"""What ranks compute on; 'CPU' for a rehearsal, which stands in for a TPU."""
BackendName = Literal["xla", "torchtpu", "torch"]
"""What ranks train with: torch_xla, TorchTPU (`torch.device("tpu")`), or plain torch.distributed"""

MOST_RANKS = 20_000
"""The most ranks of a run; the largest TPU slices have half as many chips."""
VERSION = 1
"""The version of a run folder's files, `"version"` in `spec.json`; older runs have none."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables for the number of threads of numerical libraries, which read them when loaded."""


class _Word(str, Enum):
    """Base of enums of strings that are shown as strings; enum.StrEnum needs Python 3.11."""

    __repr__ = str.__repr__

    def __str__(self) -> str:
        return str(self.value)


class RunState(_Word):
    """The state of a run; a `RunResult` has one that is not `active`."""

    STARTING = "starting"
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    HUNG = "hung"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    """Its supervisor or machine died: nothing will ever write its result."""
    AWAY = "away"
    """It comes from a bucket, so it may be running on another machine."""

    @property
    def active(self) -> bool:
        """True if the run has not ended."""
        return self in (
            RunState.STARTING,
            RunState.WAITING,
            RunState.RUNNING,
            RunState.STOPPING,
            RunState.AWAY,
        )


class StopCause(_Word):
    """Why the ranks of a run were stopped."""

    USER = "interrupt"
    TIMEOUT = "timeout"
    HUNG = "hung"
    KERNEL_GONE = "closed"
    """The kernel ended, or the supervisor got SIGTERM."""
    PREEMPTED = "lost"
    """The machine is about to be preempted or shut down, or a process of the run got SIGTERM."""
    PEER_FAILED = "peer"
    """Another rank failed."""
    HOST_LOST = "host_lost"
    """Another host of the run was lost: it died, or it no longer answers."""


class StopOrigin(_Word):
    """The way in which a user requested a stop (`StopCause.USER`)."""

    NOTEBOOK = "notebook"
    """The train cell was interrupted: Ctrl-C, the stop button, or a cell's own time-out."""
    COMMAND = "command"
    """`tpunb stop`, in a terminal."""
    MAGIC = "magic"
    """`%tpu_stop`."""
    HANDLE = "handle"
    """`BackgroundRun.stop()`."""


class PhaseKind(_Word):
    """The phase of a run."""

    QUEUED = "queued"
    """It waits for a device that another run uses."""
    STARTING = "starting"
    PRELUDE = "prelude"
    TRAINING = "training"
    COLLECTING_STACKS = "stacks"
    """It hangs: the stacks of its ranks are collected before they are stopped."""
    ENDED = "ended"


class FailureKind(_Word):
    """The kind of failure of a process of a run."""

    EXCEPTION = "exception"
    SIGNAL = "signal"
    EXIT = "exit"
    """It ended with an exit code but without an exception: os._exit, or native code."""
    OUT_OF_MEMORY = "out_of_memory"
    """The operating system killed it because memory ran out."""
    HANG = "hang"
    LOST = "lost"
    """A process of tpunb itself ended, as the fork server or the supervisor, or could not start
    the ranks."""
    PEER_LOST = "peer_lost"
    """An exception that is a consequence of another rank's end."""
    HOST_LOST = "host_lost"
    """A whole host was lost, or never connected."""
    REFUSED = "refused"
    """Nothing was started: a host differs from the others, or cannot take part."""


@dataclass(frozen=True)
class Stop:
    """Why a run is stopped and, if a user stops it, in which way."""

    cause: StopCause = StopCause.USER
    """Why the ranks are stopped."""
    reason: str = ""
    """The reason as text."""
    origin: StopOrigin | None = None
    """The way in which a user requested the stop; None if no user did."""
    now: bool = False
    """Skip the rest of the grace period."""

    @property
    def for_failed_peer(self) -> bool:
        """True if the ranks are stopped because one of them has failed, or a host was lost."""
        return self.cause in (StopCause.PEER_FAILED, StopCause.HOST_LOST)

    def without_reason(self) -> Stop:
        """Return what results and events record as data; they have the reason as text."""
        return Stop(self.cause, origin=self.origin)


@dataclass(frozen=True)
class Profile:
    """The ranks that write a trace, and the steps in it: `--profile 0,3:5-10`."""

    ranks: tuple[int, ...]
    """The ranks; () for all."""
    first: int
    """The first step, from 1."""
    last: int

    def has(self, rank: int) -> bool:
        """True if this rank writes a trace."""
        return not self.ranks or rank in self.ranks


@dataclass(frozen=True)
class Price:
    """The list price of a machine, and when it was looked up."""

    per_hour: float
    """The price of the whole machine per hour, in dollars."""
    what: str
    """The machine: 'v5litepod-8 in us-west4, on demand'."""
    date: str
    """The day on which the price was looked up, because prices change."""
    source: str
    """The source of the price."""

    def cost(self, seconds: float) -> float:
        """Return the cost of this many seconds, in dollars."""
        return self.per_hour * seconds / 3600

    def describe_cost(self, seconds: float) -> str:
        """Return 'cost: about $0.03 (v5litepod-8 in us-west4, …)'."""
        cost = self.cost(seconds)
        amount = f"about ${cost:.2f}" if cost >= 0.01 else "less than $0.01"
        return f"cost: {amount} ({self})"

    def __str__(self) -> str:
        return f"{self.what}: ${self.per_hour:.2f} an hour, as of {self.date}"


@dataclass(frozen=True)
class Block:
    """A range of lines of a script that come from one cell, line for line."""

    role: Role
    first: int
    """The first line in the script, from 1."""
    last: int
    """The last line in the script, inclusive."""
    cell: int | None = None
    """The index of the cell in the snapshot; None for the script's own header."""
    number: int | None = None
    """The number to show for the cell (see Cell.number), or its position if it never ran."""
    seconds: float | None = None
    """The duration of the cell's last run in the kernel; None if it is not known."""
    values: bool = False
    """True in a prelude for another train cell, of which only the values are read, and for
    parameters from the kernel."""
    cwd: str = ""
    """The folder in which the cell runs, as in the kernel; '': that in which the block above has
    ended."""
    origin: tuple[str, int] | None = None
    """For a cell that ran in a prelude kept from another run: the path of that run's script, from
    which the cell was compiled, and its first line in it."""


@dataclass(frozen=True)
class RunSpec:
    """Everything that the processes of a run need to know; `spec.json` in the run folder."""

    id: str
    name: str
    world_size: int
    device: Device
    cwd: str
    sys_path: tuple[str, ...]
    blocks: tuple[Block, ...]
    returns: tuple[str, ...] = ()
    grace: float = 15.0
    """The grace period: seconds between a rank's KeyboardInterrupt and SIGTERM."""
    timeout: float | None = None
    """Seconds after which the run is stopped."""
    hang_timeout: float = 300.0
    """Seconds without activity from any rank after which the run counts as hung; 0: never."""
    retries: int = 0
    """How often the ranks are started again after one has failed."""
    replicate: str | None = None
    """Why every rank runs the prelude itself; None if it runs once and the ranks are forked."""
    warm: bool = False
    """True if the backend's libraries were already imported when the run began."""
    backend: BackendName = "xla"
    spmd: int | None = None
    """The number of cores in torch_xla's SPMD mode, which one rank on each host drives; None if
    each core has a rank of its own."""
    devices_per_chip: int = 1
    """The devices of one TPU chip, as the backend counts them: 2 on some generations."""
    profile: Profile | None = None
    price: Price | None = None
    """The price of this machine; None if it is not known."""
    restored: tuple[str, ...] = ()
    """Environment variables that the prelude's cells removed in the kernel: they are set again
    when the prelude begins, and removed when it has ended."""

    resumed_from: str | None = None
    """The run, folder or URL that `--resume` named."""

    hosts: tuple[str, ...] = ()
    """The display names of the hosts in order of node rank; () for this machine only. Each host
    has `world_size / len(hosts)` ranks, and a run folder with the folders of its ranks."""
    place: str = ""
    """The place that `--on` named; '' for a run on the kernel's own machine."""

    @property
    def local_world_size(self) -> int:
        """The number of ranks on one host."""
        return self.world_size // max(1, len(self.hosts))

    @property
    def chips(self) -> int:
        """The number of TPU chips that the run uses, on all hosts; 0 in a rehearsal."""
        if self.device != "TPU":
            return 0
        return -(-(self.spmd or self.world_size) // self.devices_per_chip)

    def ranks_on(self, node_rank: int) -> range:
        """Return the (global) ranks on one host, in order."""
        first = node_rank * self.local_world_size
        return range(first, first + self.local_world_size)

    def name_rank(self, rank: int) -> str:
        """Return '3', or 'host-1/3' for a run on several hosts."""
        return self.name_ranks([rank])

    def name_ranks(self, ranks: Iterable[int]) -> str:
        """Return '0-2,5', or 'host-0/0-1,host-1/2' for a run on several hosts."""
        return name_ranks(ranks, self.hosts, self.world_size)

    def cores(self) -> str:
        """Return '4 rehearsal cores', '8 TPU cores on 2 hosts': all cores of the run."""
        return count_cores(self.spmd or self.world_size, self.device, len(self.hosts))

    def locate(self, line: int) -> tuple[int | None, int | None]:
        """Return the cell's number and the line in it (from 1) for a line of `script.py`."""
        for block in self.blocks:
            if block.cell is not None and block.first <= line <= block.last:
                return block.number, line - block.first + 1
        return None, None

    def describe_line(self, line: int) -> str:
        """Return 'cell [7], line 3' for a line of `script.py`."""
        number, within = self.locate(line)
        return f"line {line} of script.py" if number is None else f"cell [{number}], line {within}"

    @classmethod
    def from_json(cls, data: object) -> RunSpec:
        """Build a spec from the decoded `spec.json`. Raises ValueError."""
        spec = records.build(cls, data)
        named = all(name.isidentifier() for name in spec.returns)
        whole = spec.world_size % max(1, len(spec.hosts)) == 0
        if not 0 < spec.world_size <= MOST_RANKS or not named or not whole:
            raise ValueError("not the spec of a run")
        return spec


def count_cores(cores: int, device: Device, hosts: int = 0) -> str:
    """Return '4 rehearsal cores', '1 TPU core', '2 GPUs', '16 TPU cores on 4 hosts'."""
    kind = {"CPU": "rehearsal core", "TPU": "TPU core", "GPU": "GPU"}[device]
    on = f" on {hosts} hosts" if hosts > 1 else ""
    return f"{cores} {kind}{'s' if cores != 1 else ''}{on}"


def name_device(device: Device) -> str:
    """Return 'TPU', 'GPU', or 'rehearsal on CPU'."""
    return "rehearsal on CPU" if device == "CPU" else device
