"""Data classes for a captured notebook and the script made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal

from tpunb.runs.spec import Block
from tpunb.utils.terminal import Printable, Style, join, paint

CellKind = Literal["code", "markdown", "raw"]


class LeftOut(str, Enum):
    """Why a cell, or a part of a cell, is not part of a run; the values are shown to users."""

    NEVER_RAN = "it never ran in this kernel"
    FAILED = "it failed"
    DELETED = "it was deleted"
    TAGGED_SKIP = "it is tagged tpu-skip"
    TAGGED_IPYNB = "it is tagged active-ipynb"
    SKIP_COMMENT = "it begins with '# tpu: skip'"
    DEBUG_CELL = "it runs in the notebook only"
    TRAIN_CELL = "it is another train cell"
    BELOW = "it is below the train cell"
    LAUNCH = "it starts other runs with tpunb.launch"
    BELOW_LAUNCH = "it is at or below the call of tpunb.launch"

    SHELL = "shell commands run once, in the notebook"
    INSTALL = "the run uses the packages that are installed now"
    KERNEL_STATE = "the run starts with the kernel's environment"
    NOTEBOOK_ONLY = "of use in a notebook only"
    HELP = "help is shown in a notebook only"
    FILE_WRITTEN = "the cell wrote the file when it ran in the notebook"
    TPUNB_MAGIC = "tpunb's own commands are not part of a run"
    UNKNOWN_MAGIC = "tpunb does not know this magic, so its effect is missing here"
    DONE = "it was done in the notebook"
    RUN_FOLDER = "a script that runs by itself has no run folder"
    UNUSED_IMPORT = "nothing in the run needs it"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Cell:
    index: int
    """Position in the captured notebook, from 0, counting cells of all kinds."""
    kind: CellKind
    source: str
    """The text; if the text that was executed differs from the file, the executed text."""
    number: int | None = None
    """The execution count shown next to the cell; None if it never ran."""
    id: str | None = None
    """nbformat's cell id, if the cell has one."""
    tags: tuple[str, ...] = ()
    seconds: float | None = None
    """Duration of its last execution; None if unknown."""
    executions: tuple[int, ...] = field(default=(), compare=False)
    """Numbers of all its executions in this kernel, including those of earlier texts."""
    failed: bool = field(default=False, compare=False)
    """True if it raised in the kernel when it last ran, or was interrupted."""
    cwd: str = field(default="", compare=False)
    """The working directory when it last began, rather one in which it succeeded; '': unknown."""


@dataclass(frozen=True)
class LaunchCall:
    """A call of `tpunb.launch` in the running cell, which takes the place of a train cell."""

    line: int
    """Line of the call in the cell, from 1."""
    source: str
    """The code that each rank runs: one line of Python."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Arguments that ranks read from a file (`tpunb.runs.arguments`)."""
    plain: Mapping[str, object] = field(default_factory=dict)
    """All other arguments by name, as JSON values."""


@dataclass(frozen=True, repr=False)
class Snapshot(Printable):
    """The notebook as it was at the moment the train cell ran."""

    cells: tuple[Cell, ...]
    train: int | None
    """Index of the train cell; None if there is none (`tpunb convert` of such a notebook)."""
    path: str | None
    """The notebook file, if one was found."""
    origin: str
    """Source of the cells, as shown to users: 'JPY_SESSION_NAME', 'executed cells', …"""
    notes: tuple[str, ...] = ()
    """Differences from the file that the user should know about, one line each."""
    left_out: tuple[tuple[Cell, LeftOut], ...] = ()
    """Code cells that ran or are above the train cell but are not in `cells`, in order, with the
    reason (`NEVER_RAN`, `FAILED` or `DELETED`). The `index` of such a cell is the index of the
    cell in `cells` that followed it; the number of a cell that never ran is None.
    """
    name: str = "notebook"
    """Name of the notebook: its file's name without the suffix, or the front end's name for it."""
    content: Mapping[str, Any] | None = field(default=None, repr=False)
    """The decoded notebook, without outputs, if a front end sent it and it is in no file."""

    def __str__(self) -> str:
        code = sum(cell.kind == "code" for cell in self.cells)
        where = f" ({self.path})" if self.path else ""
        head = f"Snapshot of {self.name}{where}, from {self.origin}: {code} code cells"
        lines: list[str] = [paint(head, Style.STRONG)]
        if self.train is not None:
            lines.append(f"the train cell is {self.label(self.cells[self.train])}")
        lines += [f"left out: {self.label(cell)}, {why}" for cell, why in self.left_out]
        return join("\n", [*lines, *self.notes])

    def label(self, cell: Cell) -> str:
        """Return the cell as Jupyter numbers it: 'cell [7]', or 'cell [ ] (x = 1)' with its first
        line if it never ran. In a notebook of which no cell ran, the number is its position.

        `cell` must be in `cells` or `left_out`.
        """
        if cell.number is not None:
            return f"cell [{cell.number}]"
        code = [other for other in self.cells if other.kind == "code"]
        if not self.left_out and all(other.number is None for other in code):
            return f"cell [{next(at for at, other in enumerate(code, 1) if other is cell)}]"
        first = next(iter(cell.source.strip().splitlines()), "")
        return f"cell [ ] ({first if len(first) <= 40 else f'{first[:39]}…'})"


@dataclass(frozen=True)
class EarlierRun:
    """The values that the kernel has from one finished run."""

    folder: str
    names: tuple[str, ...] = ()
    """Names given to `--returns` that are bound in the kernel."""
    out: str | None = None
    """Name that `--out` bound to the RunResult or, with `handle`, to the BackgroundRun."""
    handle: bool = False
    raises: bool = True
    """True if the handle's `wait` raises the error of a failed run."""


@dataclass(frozen=True)
class Absent:
    """Why a value that a train cell should return is not in the kernel, and what to do about it."""

    why: str
    """'which is still running in the background'."""
    instead: str
    """'wait for it with `h.wait()`'."""


@dataclass(frozen=True)
class EarlierValues:
    """The values that the kernel has from one cell: a train cell, or a cell with `%tpu_attach`."""

    runs: tuple[EarlierRun, ...] = ()
    """In order; names that a later run bound replace those of an earlier run."""
    absent: Mapping[str, Absent] = field(default_factory=dict)
    """By name: values that the last execution should have returned but did not."""

    @property
    def names(self) -> set[str]:
        """All names that are bound."""
        out = {run.out for run in self.runs if run.out is not None}
        return out.union(*(run.names for run in self.runs))


@dataclass(frozen=True)
class Omission:
    """A part of a cell that does not run in the script, and why."""

    cell: int | None
    """The cell's number as shown to users."""
    line: int
    text: str
    reason: LeftOut


class Export(Enum):
    """How an exported script treats setup lines (shell lines, %env, %%writefile, …)."""

    WITH_SETUP = "with setup"
    """The script performs them itself."""
    WITHOUT_SETUP = "without setup"
    """They are left out, as in a run, which starts on the machine where they were performed."""


class Need(str, Enum):
    """Kinds of things that an exported script needs but does not contain; shown to users."""

    MODULE = "imports {}, a file of this machine: copy it along"
    FILE = "reads {}, a file of this machine: copy it along"
    SECRET = "contains a secret, which is left out: set the variable {} before the start"
    MAGIC = "{} is not known, so its effect is missing"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Requirement:
    """Something that an exported script needs but does not contain."""

    cell: int
    """The cell's number as shown to users."""
    line: int
    need: Need
    name: str
    """Name of the module, the file, the variable, …"""

    def __str__(self) -> str:
        return f"cell [{self.cell}], line {self.line}: {self.need.format(self.name)}"


@dataclass(frozen=True)
class MissingChange:
    """A name whose change by a left-out cell is missing in the run, which reads the older value."""

    name: str
    cell: str
    """'cell [4]': the left-out cell."""
    reader: str
    """'the train cell', or 'cell [6]'."""
    absent: Absent | None = None
    """Why a train cell's value is missing; None: a call of `tpunb.launch` changes the name."""

    def __str__(self) -> str:
        if self.absent is None:
            return (
                f"{self.cell} changes `{self.name}` with what a run returned, and {self.reader} "
                "reads it: this run does not have that change"
            )
        return (
            f"{self.reader} reads `{self.name}` as it is above {self.cell}, {self.absent.why}: "
            f"for its value, {self.absent.instead}"
        )


@dataclass(frozen=True)
class Script:
    """A plain `py:percent` Python file, with a mapping from its lines back to cells."""

    text: str
    blocks: tuple[Block, ...]
    omissions: tuple[Omission, ...] = ()
    spmd: str | None = None
    """Why it is known to use torch_xla's SPMD mode, in which one process drives all cores."""
    missing_changes: tuple[MissingChange, ...] = ()
    """Changes by left-out cells to names that the script defines and reads."""
    requirements: tuple[Requirement, ...] = ()
    """What an exported script needs but does not contain."""

    def locate(self, line: int) -> tuple[Block, int] | None:
        """Return the block of a script line (from 1), and the line within its cell (from 1)."""
        for block in self.blocks:
            if block.cell is not None and block.first <= line <= block.last:
                return block, line - block.first + 1
        return None

    def source(self, block: Block) -> str:
        return "\n".join(self._lines[block.first - 1 : block.last]) + "\n"

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")
