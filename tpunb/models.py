"""The data that flows through a run: Snapshot → Script → RunSpec → RunResult.

Frozen, without behaviour beyond reading itself, standard library only: the processes of a
run (guard, agent, ranks) and the kernel meet through these and the run folder.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpunb import records, telling
from tpunb.communication import Collective
from tpunb.price import Price
from tpunb.profile import Profile
from tpunb.summary import Summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tpunb.diagnosis.finding import Diagnosis

CellKind = Literal["code", "markdown", "raw"]
Role = Literal["header", "prelude", "train"]
State = Literal["succeeded", "failed", "hung", "timed_out", "interrupted"]
Device = Literal["TPU", "CPU"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""How many threads numerical libraries start. One each before ranks are forked."""


@dataclass(frozen=True)
class Cell:
    """One cell of a captured notebook."""

    index: int
    """Position in the captured notebook, from 0, all kinds of cells counted."""
    kind: CellKind
    source: str
    """What was executed, where it differs from the file."""
    number: int | None = None
    """What a person sees beside the cell: its execution count, or None if it never ran."""
    id: str | None = None
    """nbformat's cell id, where there is one."""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Snapshot(telling.Told):
    """The notebook as it was at the moment the train cell ran."""

    cells: tuple[Cell, ...]
    train: int | None
    """Index of the train cell, or None (`tpunb convert` of a notebook without one)."""
    path: str | None
    """The notebook file, if one was found."""
    origin: str
    """Where the cells come from, in words: 'JPY_SESSION_NAME', 'executed cells', …"""
    notes: tuple[str, ...] = ()
    """One line each: what a person should know about differences to the file."""
    left_out: tuple[tuple[Cell, str], ...] = ()
    """Code cells that ran or stand above the train cell and are not in `cells`, in order, and
    why: 'it never ran in this kernel', 'it failed', 'it was deleted'. The `index` of such a cell
    is that of the cell in `cells` which it stood before; one that never ran has the number None.
    """
    name: str = "notebook"
    """What the notebook is called: as its file, without the ending, or as the front end says."""
    content: str | None = field(default=None, repr=False)
    """The notebook as JSON text, without outputs, where a front end sent it and no file holds
    it."""

    def told(self) -> str:
        """What was captured, in a few lines."""
        return telling.snapshot(self)

    def called(self, cell: Cell) -> str:
        """What to call a cell, of those left out too: 'cell [7]', or 'code cell 3' (from 1, all
        code cells counted) if it has no number.
        """
        if cell.number is not None:
            return f"cell [{cell.number}]"
        # A left-out cell stands before the cell that has its index.
        code = [(other.index, 1, other) for other in self.cells if other.kind == "code"]
        code += [(other.index, 0, other) for other, _ in self.left_out]
        code.sort(key=lambda place: place[:2])
        return f"code cell {next(at for at, (*_, one) in enumerate(code, 1) if one is cell)}"


@dataclass(frozen=True)
class Block:
    """A run of lines of a script that comes from one cell. Lines are kept one for one."""

    role: Role
    first: int
    """First line in the script, from 1."""
    last: int
    """Last line in the script, inclusive."""
    cell: int | None = None
    """Index of the cell in the snapshot (None: the script's own header)."""
    number: int | None = None
    """The number to show for the cell (see Cell.number); its position where it never ran."""


@dataclass(frozen=True)
class Omission:
    """A piece of a cell that does not run in the script, and why."""

    cell: int | None
    """The number to show for the cell."""
    line: int
    text: str
    reason: str


@dataclass(frozen=True)
class Script:
    """A plain `py:percent` Python file and the way back from its lines to cells."""

    text: str
    blocks: tuple[Block, ...]
    omissions: tuple[Omission, ...] = ()
    spmd: str | None = None
    """What shows that it uses torch_xla's SPMD mode, where one process drives all cores."""

    def locate(self, line: int) -> tuple[Block, int] | None:
        """The block and the line within its cell (from 1) of a script line (from 1)."""
        for block in self.blocks:
            if block.cell is not None and block.first <= line <= block.last:
                return block, line - block.first + 1
        return None

    def source(self, block: Block) -> str:
        """The text of a block."""
        return "\n".join(self._lines[block.first - 1 : block.last]) + "\n"

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")


@dataclass(frozen=True)
class RunSpec:
    """Everything the processes of a run need to know; `spec.json` in the run folder."""

    id: str
    name: str
    world_size: int
    device: Device
    cwd: str
    sys_path: tuple[str, ...]
    blocks: tuple[Block, ...]
    returns: tuple[str, ...] = ()
    grace: float = 15.0
    """Seconds between a rank's KeyboardInterrupt and SIGTERM."""
    timeout: float | None = None
    """Seconds after which the run is stopped."""
    hang_timeout: float = 300.0
    """Seconds without a sign of life after which the run is called hung; 0: it never is."""
    retries: int = 0
    """How often the ranks are started again after one has failed."""
    replicate: str | None = None
    """Why every rank runs the prelude itself; None: it runs once and the ranks are forked."""
    warm: bool = False
    """True if torch and torch_xla were already imported when the run began."""
    spmd: int | None = None
    """How many cores the one process of the run drives, in torch_xla's SPMD mode; None: there is
    a process, a rank, for each core."""

    profile: Profile | None = None
    price: Price | None = None
    """What this machine costs; None where it is not known."""

    def counted(self) -> str:
        """'4 rehearsal cores', '8 TPU cores': all that the run uses."""
        return _counted(self.spmd or self.world_size, self.device)

    def locate(self, line: int) -> tuple[int | None, int | None]:
        """The cell's number and the line within it (from 1) of a line of `script.py`."""
        for block in self.blocks:
            if block.cell is not None and block.first <= line <= block.last:
                return block.number, line - block.first + 1
        return None, None

    def place(self, line: int) -> str:
        """'cell [7], line 3' for a line of `script.py`."""
        number, within = self.locate(line)
        return f"line {line} of script.py" if number is None else f"cell [{number}], line {within}"

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunSpec:
        """The inverse of `to_json`."""
        values = dict(data)
        values["blocks"] = tuple(Block(**block) for block in values["blocks"])
        values["sys_path"] = tuple(values["sys_path"])
        values["returns"] = tuple(values["returns"])
        values["profile"] = Profile.from_json(values.get("profile"))
        values["price"] = Price(**values["price"]) if values.get("price") else None
        return cls(**values)


@dataclass(frozen=True)
class Failure:
    """How one process of a run failed."""

    rank: int | None
    """None: the prelude, or a process of tpunb itself."""
    pid: int | None
    exitcode: int | None
    signal: str | None
    """'SIGKILL', … where it ended so. Neither is known where the stop met it on its way out."""
    type: str
    """The exception's class name, or 'Signal' / 'Exit'."""
    message: str
    cell: int | None
    line: int | None
    traceback: str
    """In notebook terms, ready to be shown."""
    time: float
    """Seconds since the epoch."""
    source: tuple[tuple[int, str], ...] = ()
    """The lines of the cell around the one where it failed, with their numbers."""
    cell_id: str | None = None
    """nbformat's id of the cell, where it has one."""

    def is_like(self, other: Failure) -> bool:
        """Whether it is the same in another rank."""
        return (self.type, self.cell, self.line) == (other.type, other.cell, other.line)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        """An entry of `failures` in `result.json`."""
        source = tuple((number, line) for number, line in data.get("source", ()))
        return cls(**{**data, "source": source})

    def headline(self) -> str:
        """One line: who, where, what."""
        who = "the prelude" if self.rank is None else f"rank {self.rank}"
        place = "" if self.cell is None else f" in cell [{self.cell}]"
        if self.cell is not None and self.line is not None:
            place += f", line {self.line}"
        if self.type == "Lost":  # agent or guard, which are nobody's cell
            return self.message.strip().partition("\n")[0]
        if self.type in ("Signal", "Exit"):
            return f"{who} {self.message}{place}"
        first = self.message.strip().partition("\n")[0]
        return f"{who} failed{place}: {self.type}: {first}".rstrip(": ")


@dataclass(frozen=True, repr=False)
class RunResult(telling.Told):
    """How a run ended and what it left. `result.json` holds the same."""

    state: State
    name: str
    world_size: int
    device: Device
    started: float
    ended: float
    dir: Path
    returncode: int | None = 0
    attempts: int = 1
    failures: tuple[Failure, ...] = ()
    """Earliest first."""
    peak_memory: tuple[int, ...] = ()
    """The most memory that each rank has held at once, in bytes; shared pages count in each."""
    memory_limit: int = 0
    """What this container, or else this machine, has, in bytes; 0 where it is not known."""
    collectives: tuple[Collective, ...] = ()
    """Of a rehearsal: how many, how many bytes and how long, by rank and operation."""
    warm: bool = False
    replicated: bool = False
    """True if every rank ran the prelude itself."""
    replicate_reason: str = ""
    """Why it did."""
    reason: str = ""
    """Why the run was stopped, where it was."""
    price: Price | None = None
    """What the machine cost, as far as that was known when the run began."""
    returns: Mapping[str, Any] = field(default_factory=dict)
    """Values of `--returns` from rank 0, tensors on the CPU."""
    returns_failed: Mapping[str, str] = field(default_factory=dict)
    """Names of `--returns` that did not arrive, and why."""
    spmd: int | None = None
    """How many cores the one rank drove, in torch_xla's SPMD mode; None: each rank had one."""
    diagnoses: tuple[Diagnosis, ...] = ()
    """What is known about the causes of a failure, the likeliest first."""
    summary: Summary = field(default_factory=Summary)
    """Best metrics, where the time went, and what is odd."""

    def to_json(self) -> dict[str, Any]:
        """The content of `result.json`: of returns the names, without the folder itself."""
        data = asdict(replace(self, returns={}, diagnoses=(), summary=Summary()))
        del data["dir"], data["returns_failed"], data["diagnoses"], data["summary"]
        return {**data, "returns": list(self.returns), "cost": self.cost}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], folder: Path) -> RunResult:
        """What `to_json` wrote, without values of returns."""
        values = dict(data)
        del values["returns"]
        values.pop("cost", None)  # it follows from the price
        values["peak_memory"] = tuple(values.get("peak_memory", ()))
        values["failures"] = tuple(map(Failure.from_json, values["failures"]))
        values["collectives"] = tuple(Collective(**row) for row in values.get("collectives", ()))
        values["price"] = Price(**values["price"]) if values.get("price") else None
        return cls(dir=folder, **values)

    @property
    def failure(self) -> Failure | None:
        """The first failure, which is the root cause of those that follow."""
        return self.failures[0] if self.failures else None

    @property
    def duration(self) -> float:
        """Seconds from the start to the last process gone."""
        return self.ended - self.started

    @property
    def cost(self) -> float | None:
        """US dollars for the machine while the run went on; None where its price is not known.

        `price` says of which machine, and when the price was read.
        """
        return None if self.price is None else round(self.price.cost(self.duration), 4)

    def metrics(self, *, reduced: bool = False) -> pd.DataFrame:
        """What `tpunb.log` recorded: a row per call and rank, in order of time.

        Columns `step`, `rank`, `time` (seconds since the run's start), then the metrics. With
        `reduced` a row per step, without `rank`: each metric over the ranks as `tpunb.log` was
        told (`reduce=`, the mean by default). After a retry a step counts once.
        """
        rows = records.read(self.dir / "metrics.jsonl")
        return records.frame(rows, self.started, reduced=reduced)

    def plot(self, *others: RunResult) -> Figure:
        """A matplotlib figure with a panel for each metric; with `others` a line for each run.

        Reduced over ranks, by step. Raises MissingPackageError without matplotlib, ValueError
        where nothing was logged.
        """
        from tpunb.figures import panels

        runs = (self, *others)
        names = [run.name for run in runs]
        unique = len(set(names)) == len(names)
        return panels({
            run.name if unique else run.dir.name: run.metrics(reduced=True) for run in runs
        })  # fmt: skip

    def raise_for_failure(self) -> None:
        """Raise the RunError of this result's state; nothing if the run succeeded."""
        from tpunb import errors

        kinds: dict[str, type[errors.RunError]] = {
            "failed": errors.RankFailedError,
            "hung": errors.RunHungError,
            "timed_out": errors.RunTimeoutError,
            "interrupted": errors.RunInterruptedError,
        }
        if self.state in kinds:
            raise kinds[self.state](self)

    def cores(self) -> str:
        """'4 rehearsal cores', '8 TPU cores', '4 rehearsal cores (SPMD)'."""
        counted = _counted(self.spmd or self.world_size, self.device)
        return f"{counted} (SPMD)" if self.spmd else counted

    def explain(self, *, traceback: bool = True) -> str:
        """The end of the run in words: what, where, why, what to do, and the log's path.

        `traceback`: with that of the first failure.
        """
        return telling.explain(self, traceback=traceback)

    def told(self) -> str:
        """The result as text, as a person reads it at the end of a cell."""
        return telling.text(self)


def _counted(cores: int, device: Device) -> str:
    kind = "rehearsal" if device == "CPU" else "TPU"
    return f"{cores} {kind} core{'s' if cores != 1 else ''}"


def signal_name(number: int) -> str:
    """'SIGKILL' for 9; 'signal 99' for a number without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
