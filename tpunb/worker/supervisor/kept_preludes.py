"""Kept preludes: processes that have run the first cells, or none, in which later runs begin.

    add(): a runner has left a copy
      │
      v
    kept ── begin(run): the longest one that fits the run ──> taken: it becomes the runner,
      │                                                       and leaves a copy: add()
      ├── begin(run): cells, surroundings or modules have changed ──────────> killed
      ╰── memory is scarce, more than MOST, no run for long, process died ──> killed

Losing one costs time only: the next run begins in a shorter one. The shortest is the fork server,
which has run no cell: it fits every run, is taken and leaves a copy like the others, and stays.
Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from socket import socket, socketpair

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.protocol import OrderChannel, PreludeKept
from tpunb.runs.spec import Block, RunSpec
from tpunb.utils import env_vars, memory, processes
from tpunb.utils.processes import Process
from tpunb.utils.text import size

log = logging.getLogger(__name__)

MOST = 24
"""Preludes kept at once. Each has memory of its own (20 MB and what its cells changed)."""
BIRTH = 5.0
"""Seconds that a run's end waits at most for a copy that is being made, and would end with it."""
SCARCE = 0.1
"""Part of the memory: with less than this available, no prelude is kept."""


@dataclass(frozen=True)
class KeptCell:
    """A cell of a prelude; it has to run again if any field has changed."""

    number: int | None
    """The execution count: it changes when the cell is executed again in the kernel."""
    source: str
    cwd: str
    """The folder in which it runs; '' if that makes no difference."""
    values: bool = False
    """It is another train cell, of which only the values are read, or assigns parameters: it is
    not named as one that runs."""

    @property
    def name(self) -> str:
        """'[3]'."""
        return f"[{self.number}]"


@dataclass(frozen=True)
class PreludeInputs:
    """Everything that determines the state after a prelude."""

    surroundings: Mapping[str, object]
    """By name: `sys.path`, environment variables, and the like."""
    cells: tuple[KeptCell, ...]
    blocks: tuple[Block, ...]
    """The blocks of these cells in the run's script."""
    script: str

    @classmethod
    def of_run(
        cls,
        run: RunDir,
        spec: RunSpec,
        env: Mapping[str, str],
        set_by_imports: Mapping[str, Collection[str]],
    ) -> PreludeInputs:
        """The inputs of a run, whose folder holds its script.

        `set_by_imports`: variables that torch and torch_xla set when they are imported, with the
        values before and after. Whether the kernel imported them before the run makes no
        difference.
        """
        lines = run.script.read_text(encoding="utf-8").split("\n")
        blocks = tuple(block for block in spec.blocks if block.role == "prelude")
        variables = {
            f"the variable {name}": value
            for name, value in env.items()
            if name not in env_vars.PER_RUN and value not in set_by_imports.get(name, ())
        }
        surroundings = {
            "sys.path": spec.sys_path,
            "the device": (spec.device, spec.spmd),
            **variables,
        }
        cells = tuple(
            KeptCell(
                block.number,
                "\n".join(lines[block.first - 1 : block.last]),
                "" if block.values else block.cwd or spec.cwd,
                block.values,
            )
            for block in blocks
        )
        return cls(surroundings, cells, blocks, str(run.script))

    def origins(self) -> tuple[tuple[str, int], ...]:
        """For each cell, the file that it is compiled from and its first line in that file."""
        return tuple((self.script, block.first) for block in self.blocks)


@dataclass(frozen=True)
class Waiting:
    """A process that becomes a runner when it is ordered to."""

    process: Process
    channel: OrderChannel
    ran: int
    """How many cells have run in it; none in the fork server."""


@dataclass(frozen=True)
class KeptPrelude(Waiting):
    """A process that has run the first cells of a prelude."""

    inputs: PreludeInputs
    origins: tuple[tuple[str, int], ...]
    seconds: float
    """How long it would take to make it again from the next shorter one."""
    modules: Mapping[str, Sequence[int]]
    folders: Sequence[str]

    def lost(self) -> str:
        """Why it can no longer be used, whatever the run's cells are; '' if it can."""
        for file, seen in self.modules.items():
            try:
                status = os.stat(file)
            except OSError:
                return f"{os.path.basename(file)} is gone"
            if [status.st_mtime_ns, status.st_size] != list(seen):
                return f"{os.path.basename(file)} has changed"
        for folder in self.folders:
            if not os.path.isdir(folder):
                return "the temporary folder that a cell made is gone"
        return ""


class KeptPreludes:
    """The kept preludes of one supervisor. One run at a time begins in them."""

    def __init__(self) -> None:
        self.set_by_imports: Mapping[str, Collection[str]] = {}
        self.fork_server: Waiting | None = None
        """The one that has run no cell; None while there is none."""
        self._kept: list[KeptPrelude] = []
        self._sockets: dict[int, socket] = {}
        """The supervisor's ends of the connections to copies that the current runner may leave."""
        self.next_copy = 0
        """The number of the first copy that the next runner may leave."""
        self._inputs: PreludeInputs | None = None
        """The inputs of the current run, or of the last one."""
        self._origins: tuple[tuple[str, int], ...] = ()
        self._taken = 0
        """How many cells had run already when the current run began."""
        self._successor_until = 0.0
        """Until when the prelude that was taken is expected to leave a copy; 0: no copy is due."""
        self._added = False
        """True if the current run has left a copy in which more cells have run than before."""
        self._reason = ""
        """Why later runs cannot begin after the whole prelude of the current run."""

    @property
    def processes(self) -> list[Process]:
        """Those of the kept preludes, without the fork server."""
        return [kept.process for kept in self._kept]

    def begin(
        self, run: RunDir, spec: RunSpec, env: Mapping[str, str], tell: Callable[[Note], None]
    ) -> tuple[Waiting | None, RunSpec]:
        """Take the kept prelude with most of a run's first cells, the fork server if none fits.

        Returns the spec as well, in which, as in the run's spec.json, is from which files its cells
        were compiled. Ends the kept preludes that are out of date. `tell` gets the note for the
        user.
        """
        inputs, before = PreludeInputs.of_run(run, spec, env, self.set_by_imports), self._inputs
        reason = "" if before is None else _difference(before, inputs)
        before_kept = bool(self._kept)
        self._drop_dead()
        fitting = [kept for kept in self._kept if _fits(kept, inputs)]
        if lost := next((words for kept in fitting if (words := kept.lost())), ""):
            # Cells before the import may have used the file as well: begin from the start.
            reason, fitting = lost, []
        self._end([kept for kept in self._kept if lost or _is_stale(kept, inputs)])
        best = max(fitting, key=lambda kept: kept.ran, default=None)
        ran = 0 if best is None else best.ran
        line = _describe(inputs.cells, ran, reason or self._reason)
        if line and (before_kept or self._reason):
            tell(Note(line, minor=True))
        self._inputs, self._reason = inputs, ""
        self._origins, self._taken = inputs.origins(), ran
        if best is None:
            return self.take_fork_server(), spec
        self._kept.remove(best)
        self._origins = best.origins + self._origins[ran:]
        return best, _note_origins(run, spec, self._origins[:ran])

    def take_fork_server(self) -> Waiting | None:
        """Take the fork server, until its copy is added."""
        taken, self.fork_server = self.fork_server, None
        return taken

    def awaits_successor(self) -> bool:
        """True while the prelude that was taken is about to leave a copy: signal nothing now."""
        return time.monotonic() < self._successor_until

    def make_sockets(self, taken: Waiting, cells: int) -> list[socket]:
        """The new runner's ends of sockets: for the copy that replaces it, and one for each cell.

        While memory is scarce, only the fork server leaves a copy.
        """
        self.close_sockets()
        most = 1 + cells
        if _memory_is_scarce():
            self._reason = "memory is scarce"
            most = int(not taken.ran)
        theirs = []
        for _ in range(min(most, MOST)):
            self._sockets[self.next_copy], other = socketpair()
            self.next_copy += 1
            theirs.append(other)
        self._successor_until = time.monotonic() + BIRTH if theirs else 0.0
        return theirs

    def add(self, message: PreludeKept) -> None:
        """Add a copy that the current runner has left.

        A copy of an earlier runner comes too late: it ends, because its connection is closed.
        """
        self._successor_until = 0.0
        process = processes.find_process(message.pid)
        end = self._sockets.pop(message.copy, None)
        if process is None or end is None:
            return
        if not message.cells:
            self.fork_server = Waiting(process, OrderChannel(end), 0)
            return
        assert self._inputs is not None
        cells = self._inputs.cells[: message.cells]
        new = cells[self._taken :]
        self._added = self._added or not all(cell.values for cell in new)
        if cells[-1].values:  # to read values again is cheap, a copy takes 30 MB
            self._end([kept for kept in self._kept if kept.inputs.cells[kept.ran - 1].values])
        self._kept.append(
            KeptPrelude(
                process=process,
                channel=OrderChannel(end),
                inputs=self._inputs,
                ran=message.cells,
                origins=self._origins[: message.cells],
                seconds=message.seconds,
                modules=message.modules,
                folders=message.folders,
            )
        )
        if len(self._kept) > MOST:
            # Never the longest: the next run is most likely to begin in it.
            longest = max(kept.ran for kept in self._kept)
            shorter = [kept for kept in self._kept if kept.ran < longest]
            self._end([min(shorter or self._kept[:-1], key=lambda kept: kept.seconds)])

    def note_not_kept(self, reason: str) -> None:
        """Note why later runs cannot begin after some cell of the current run."""
        self._reason = reason

    def close_sockets(self) -> None:
        """Close the sockets: the current runner leaves no further copy."""
        self._successor_until = 0.0
        for end in self._sockets.values():
            end.close()
        self._sockets.clear()

    def describe(self) -> str:
        """The cells kept after a run, and their memory; '' if no more are kept than before."""
        self._drop_dead()
        if not (self._added and self._kept and self._inputs and self.fork_server):
            return ""
        self._added = False
        longest = max(kept.ran for kept in self._kept)
        server, kept = self.fork_server.process, self.processes
        used = memory.added_memory(server.pid, [process.pid for process in kept])
        cells = _count(self._inputs.cells[:longest])
        return f"kept for the next run: {cells} cells ({size(used)})"

    def end_all(self, reason: str) -> None:
        """End all kept preludes, for a reason that the next run shows."""
        if self._kept:
            log.info("kept preludes end: %s", reason)
            self._reason = reason
        self._end(list(self._kept))

    def spare_memory(self) -> None:
        """End all kept preludes if memory is scarce."""
        if self._kept and _memory_is_scarce():
            self.end_all("memory was scarce")

    def _drop_dead(self) -> None:
        self._end([kept for kept in self._kept if not processes.is_alive(kept.process)])

    def _end(self, ending: Sequence[KeptPrelude]) -> None:
        for kept in ending:
            self._kept.remove(kept)
            kept.channel.close()
            processes.send_signal(kept.process, signal.SIGKILL)


def _fits(kept: KeptPrelude, inputs: PreludeInputs) -> bool:
    return (
        kept.inputs.surroundings == inputs.surroundings
        and kept.inputs.cells[: kept.ran] == inputs.cells[: kept.ran]
    )


def _is_stale(kept: KeptPrelude, inputs: PreludeInputs) -> bool:
    """True if it cannot fit a later run. With more cells than this run, it may fit another's."""
    common = min(kept.ran, len(inputs.cells))
    return (
        kept.inputs.surroundings != inputs.surroundings
        or kept.inputs.cells[:common] != inputs.cells[:common]
    )


def _note_origins(run: RunDir, spec: RunSpec, origins: Sequence[tuple[str, int]]) -> RunSpec:
    """Record in spec.json the files from which the cells that do not run again were compiled."""
    left = list(origins)
    blocks = tuple(
        replace(block, origin=left.pop(0)) if left and block.role == "prelude" else block
        for block in spec.blocks
    )
    spec = replace(spec, blocks=blocks)
    with contextlib.suppress(OSError):  # if it fails, tracebacks name lines of another script
        run.write_spec(spec)
    return spec


def _difference(before: PreludeInputs, now: PreludeInputs) -> str:
    """A description of the first difference to the prelude of the previous run."""
    for name in (*before.surroundings, *now.surroundings):
        if before.surroundings.get(name) != now.surroundings.get(name):
            verb = "have" if name.endswith("s") else "has"
            return f"{name} {verb} changed"
    old = tuple(cell for cell in before.cells if not cell.values)
    new = tuple(cell for cell in now.cells if not cell.values)
    if old == new:
        at = _first_difference(before.cells, now.cells)
        return "" if at is None else f"the values of cell {now.cells[at].name} are new"
    at = _first_difference(old, new)
    if at is None:
        return ""
    if old[at].source == new[at].source:
        return f"cell {new[at].name} was executed again"
    if old[at] in new[at + 1 :]:
        return f"cell {new[at].name} is new"
    if new[at] in old[at + 1 :]:
        return f"a cell above {new[at].name} is gone"
    return f"cell {new[at].name} has changed"


def _first_difference(old: Sequence[KeptCell], new: Sequence[KeptCell]) -> int | None:
    """The index of the first cell that differs; None if one is the beginning of the other."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)


def _describe(cells: Sequence[KeptCell], ran: int, reason: str) -> str:
    """'prelude: 3 of 5 cells reused: cell [4] has changed'; '' without cells to name.

    Numbers of cells are execution counts, which are in no order: the cells are counted instead.
    """
    kept, own = _count(cells[:ran]), _count(cells)
    why = f": {reason}" if reason and kept < own else ""
    return f"prelude: {kept} of {own} cells reused{why}" if own else ""


def _count(cells: Sequence[KeptCell]) -> int:
    """The number of cells that are no train cells."""
    return sum(not cell.values for cell in cells)


def _memory_is_scarce() -> bool:
    available, total = memory.available_memory(), memory.total_memory()
    return bool(available is not None and total and available < SCARCE * total)
