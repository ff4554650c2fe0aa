"""A captured notebook and the script made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Literal

from tpunb.runs.spec import Block
from tpunb.utils.terminal import Printable, Style, join, paint

KEPT = "tpunb-kept"
"""Tag of a cell that the kernel of a sweep's trial does not run, but its runs do."""

CellKind = Literal["code", "markdown", "raw"]


class LeftOut(str, Enum):
    """Why a cell, or a piece of one, is not part of a run; the values are for people."""

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
    KERNEL_STATE = "the run starts with the kernel's environment and directory"
    NOTEBOOK_ONLY = "of use in a notebook only"
    HELP = "help is shown in a notebook only"
    FILE_WRITTEN = "the cell wrote the file when it ran in the notebook"
    TPUNB_MAGIC = "tpunb's own commands are not part of a run"
    UNKNOWN_MAGIC = "tpunb does not know this magic, so its effect is missing here"
    DONE = "it was done in the notebook"
    ONLY_DISPLAYS = "it only displays, and the run needs nothing of it"
    RUN_FOLDER = "a script that runs by itself has no run folder"
    UNUSED_IMPORT = "nothing in the run needs it"

    def __str__(self) -> str:
        return self.value


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
    seconds: float | None = None
    """How long its last execution took; None if that is not known."""
    executions: tuple[int, ...] = field(default=(), compare=False)
    """The numbers of all its executions in this kernel, whatever its text was then."""


@dataclass(frozen=True)
class LaunchCall:
    """A call of `tpunb.launch` in the cell that is running, which takes the train cell's place."""

    line: int
    """Of the cell, from 1."""
    source: str
    """What each rank runs: one line of Python."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """What that takes from a file (`tpunb.runs.arguments`)."""
    plain: Mapping[str, object] = field(default_factory=dict)
    """The other arguments by their names, as JSON values."""


@dataclass(frozen=True, repr=False)
class Snapshot(Printable):
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
    left_out: tuple[tuple[Cell, LeftOut], ...] = ()
    """Code cells that ran or stand above the train cell and are not in `cells`, in order, and
    why (`NEVER_RAN`, `FAILED` or `DELETED`). The `index` of such a cell is that of the cell in
    `cells` which it stood before; one that never ran has the number None.
    """
    name: str = "notebook"
    """What the notebook is called: as its file, without the ending, or as the front end says."""
    content: str | None = field(default=None, repr=False)
    """The notebook as JSON text, without outputs, where a front end sent it and no file holds
    it."""

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
        """'cell [7]', or 'code cell 3' (from 1, of all code cells) for a cell without a number.

        `cell` is one of `cells` or `left_out`.
        """
        if cell.number is not None:
            return f"cell [{cell.number}]"
        # A left-out cell stands before the cell that has its index.
        code = [(other.index, 1, other) for other in self.cells if other.kind == "code"]
        code += [(other.index, 0, other) for other, _ in self.left_out]
        code.sort(key=lambda place: place[:2])
        position = next(at for at, (*_, other) in enumerate(code, 1) if other is cell)
        return f"code cell {position}"


@dataclass(frozen=True)
class HandedRun:
    """What the kernel has got from one run that has ended."""

    folder: str
    names: tuple[str, ...] = ()
    """Of `--returns`, that are bound in the kernel."""
    out: str | None = None
    """What `--out` has bound: its RunResult, or with `handle` its BackgroundRun."""
    handle: bool = False
    raises: bool = True
    """Whether the handle's `wait` raises the error of a run that has failed."""


@dataclass(frozen=True)
class Absent:
    """Why the kernel has not got what a train cell is to return, and what to do about it."""

    why: str
    """'which is still running in the background'."""
    instead: str
    """'wait for it with `h.wait()`'."""


@dataclass(frozen=True)
class Handed:
    """What the kernel has got from one cell: a train cell, or one with `%tpu_attach`."""

    runs: tuple[HandedRun, ...] = ()
    """In order; what a later one has bound replaces what an earlier one has."""
    absent: Mapping[str, Absent] = field(default_factory=dict)
    """By name: what the last execution was to bring and has not brought."""

    @property
    def names(self) -> set[str]:
        """All that is bound."""
        out = {run.out for run in self.runs if run.out is not None}
        return out.union(*(run.names for run in self.runs))


@dataclass(frozen=True)
class Omission:
    """A piece of a cell that does not run in the script, and why."""

    cell: int | None
    """The number to show for the cell."""
    line: int
    text: str
    reason: LeftOut


class Export(Enum):
    """What becomes of setup lines (shell lines, %env, %%writefile, …) in an exported script."""

    WITH_SETUP = "with setup"
    """It does them itself."""
    WITHOUT_SETUP = "without setup"
    """They are left out, as in a run, which the kernel starts where they were done."""


class Need(str, Enum):
    """What an exported script needs and does not hold; the values are for people."""

    MODULE = "imports {}, a file of this machine: copy it along"
    FILE = "reads {}, a file of this machine: copy it along"
    SECRET = "holds a secret, which is not written out: set the variable {} before the start"
    MAGIC = "{} is not known, so what it does is missing"
    TPUNB = "needs tpunb ({}): pip install tpunb"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Requirement:
    """Something that an exported script needs and does not hold."""

    cell: int
    """The number to show for the cell."""
    line: int
    need: Need
    name: str
    """Of the module, the file, the variable, …"""

    def __str__(self) -> str:
        return f"cell [{self.cell}], line {self.line}: {self.need.format(self.name)}"


@dataclass(frozen=True)
class Lacking:
    """A name that a run reads as it was before a cell that is left out of the run."""

    name: str
    cell: str
    """'cell [4]': the one that is left out."""
    reader: str
    """'the train cell', or 'cell [6]'."""
    absent: Absent | None = None
    """Why a train cell's value is not there; None: the cell is skipped, and changes the name."""

    def __str__(self) -> str:
        if self.absent is None:
            return (
                f"{self.cell} is skipped and changes `{self.name}`, which {self.reader} reads: "
                "the run does not have that change"
            )
        return (
            f"{self.reader} reads `{self.name}` as it is above {self.cell}, {self.absent.why}: "
            f"for its value, {self.absent.instead}"
        )


@dataclass(frozen=True)
class Script:
    """A plain `py:percent` Python file and the way back from its lines to cells."""

    text: str
    blocks: tuple[Block, ...]
    omissions: tuple[Omission, ...] = ()
    spmd: str | None = None
    """What shows that it uses torch_xla's SPMD mode, where one process drives all cores."""
    lacking: tuple[Lacking, ...] = ()
    """What cells that are left out do to names that the script has and reads."""
    requirements: tuple[Requirement, ...] = ()
    """Of a script that is exported."""

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
