"""Prepares a run from a notebook's executed cells, and describes the plan for `--dry-run`.

This module imports nbconvert, which takes two seconds: import it when a train cell needs it, or
earlier in the background.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from tpunb.backends.choice import LABELS, BackendChoice
from tpunb.kernel import cost
from tpunb.kernel.current_parameters import Parameters, PlainNames, with_parameters
from tpunb.kernel.options import LAST, TrainOptions, ranks_to_show
from tpunb.kernel.returned import Returned
from tpunb.machine import environment
from tpunb.machine.auto_stop import TpuVm
from tpunb.machine.environment import EnvChange, SpmdEnvironment
from tpunb.machine.machine import Machine
from tpunb.notebook.capture.capture import capture
from tpunb.notebook.capture.history import Execution, History
from tpunb.notebook.convert import assigned
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.fork_safety import static_reason
from tpunb.notebook.convert.launch_calls import with_call
from tpunb.notebook.files import cell_magics
from tpunb.notebook.lint.checks.cell_names import NOT_RETURNED
from tpunb.notebook.lint.findings import SEVERITIES, Finding, LintError
from tpunb.notebook.lint.linter import lint
from tpunb.notebook.models import LaunchCall, Script, Snapshot
from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.parameters import TAGS
from tpunb.runs.spec import BackendName, RunSpec
from tpunb.utils import cpus, env_vars, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.modules import import_path

if TYPE_CHECKING:
    from tpunb.places.hosts_target import Target

REPLICATE_OPTION = "--replicate"
MOST_FINDINGS = 3
"""Findings about the train cell that are shown before the run."""


@dataclass(frozen=True)
class PreparedNotebook:
    """A notebook at the moment its train cell runs: captured, converted and linted."""

    snapshot: Snapshot
    script: Script
    replicate: str | None
    """Why every rank must run the prelude itself; None: it runs once."""
    findings: tuple[Finding, ...]
    """Lint's findings, in the order of the notebook."""
    parameters: Parameters = field(default_factory=Parameters)
    """The run's parameters, and what has changed in the kernel that it does not have."""
    removed: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that the prelude's cells removed in the kernel, and their values."""

    def raise_for_lint(self) -> None:
        """Raise LintError if a run would certainly fail."""
        if certain := [finding for finding in self.findings if finding.certain]:
            raise LintError(certain)

    def lint_lines(self) -> dict[tuple[str, str], str]:
        """Return a line for each error and warning about the train cell, by its rule and code."""
        lines, known = dict[tuple[str, str], str](), set[object]()
        for each in sorted(self.findings, key=lambda f: (f.below, SEVERITIES.index(f.severity))):
            keys = {(each.cell, each.line), each.message}
            # One for each line of code, and each message once.
            if each.own and each.severity != "hint" and known.isdisjoint(keys):
                key = (each.rule, each.source)  # numbers of cells change whenever a cell runs
                lines[key] = f"lint: {each.in_one_line()}. Fix: {each.fix}"
            known |= keys
        return dict([*lines.items()][:MOST_FINDINGS])


@contextmanager
def _without_collection() -> Iterator[None]:
    """Let Python's garbage collector wait: all objects of a kernel take it longer than the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collection()
def prepare_notebook(
    history: History,
    cell: str | LaunchCall,
    *,
    notebook: str | None,
    user_ns: Mapping[str, object],
    returned: Returned,
    replicate: bool,
    replay: bool,
    backend: BackendName = "xla",
    ranks: int | None = None,
) -> PreparedNotebook:
    """Capture, convert and lint the notebook. Raises NotebookError and ConversionError.

    `cell`: the train cell's body, or a call of
    `tpunb.launch` in the running cell. `notebook`: the path that the user gave. `returned`: values
    that runs returned to the kernel. `replicate`: every rank runs the prelude in any case.
    `replay`: nothing but `returned` is taken from the kernel. `ranks`: how many the run has.
    """
    body = None if isinstance(cell, LaunchCall) else cell
    snapshot = capture(history, body, notebook=notebook, user_ns=user_ns)
    if isinstance(cell, LaunchCall):
        snapshot = with_call(snapshot, cell)
    got, left = returned.by_cell(snapshot.cells), returned.left_by_launches(user_ns)
    held = () if replay else PlainNames(user_ns)
    script, current = convert(snapshot, got, left=left, held=held), Parameters()
    if not replay:
        others = _others(history, snapshot, script)
        script, current = with_parameters(script, user_ns, others, history.running())
        if any(TAGS & set(each.tags) for each in snapshot.cells):  # then these are the parameters
            current.values = {k: v for k, v in current.values.items() if k not in current.own}
    prelude = {block.cell for block in script.blocks if block.role == "prelude"}
    executed = {n for c in snapshot.cells if c.index in prelude for n in c.executions}
    removed = history.removed_variables(executed)
    made = _lint(snapshot, script, replicate=replicate, held=held, backend=backend, ranks=ranks)
    return replace(made, parameters=current, removed=removed)


def _others(history: History, snapshot: Snapshot, script: Script) -> list[Execution]:
    """Return the executions of cells that are not part of the run, and the one that starts it."""
    run = {block.cell for block in script.blocks}
    own = {number for cell in snapshot.cells if cell.index in run for number in cell.executions}
    return [
        each
        for each in history.executions()
        if (each.number not in own or each.number == history.running())
        and "tpu_train" not in cell_magics(each.source)
    ]


def prepare_file(
    snapshot: Snapshot, *, replicate: bool, backend: BackendName, ranks: int
) -> PreparedNotebook:
    """Convert and lint a notebook file, for a run without a kernel. Raises like above."""
    return _lint(snapshot, convert(snapshot), replicate=replicate, backend=backend, ranks=ranks)


def _lint(
    snapshot: Snapshot,
    script: Script,
    *,
    replicate: bool,
    held: Container[str] = (),
    backend: BackendName,
    ranks: int | None,
) -> PreparedNotebook:
    """Lint the cells of the run. Those below are not part of it, but may use what it does not
    return.
    """
    end = None if snapshot.train is None else snapshot.train + 1
    run = replace(snapshot, cells=snapshot.cells[:end])
    findings = lint(run, held, backend=backend, ranks=ranks, own=True)
    below = end is not None and end < len(snapshot.cells)
    if below and end is not None and "tpu_train" in cell_magics(snapshot.cells[end - 1].source):
        returned = lint(snapshot, rules=[NOT_RETURNED], backend=backend)
        findings += [finding for finding in returned if finding.own]
    reason = REPLICATE_OPTION if replicate else static_reason(script)
    return PreparedNotebook(snapshot, script, reason, tuple(findings))


@dataclass(frozen=True)
class RunRequest:
    """Everything that is decided before a run starts."""

    options: TrainOptions
    notebook: PreparedNotebook
    machine: Machine
    cores: int
    spmd: SpmdEnvironment | None
    """The environment if one process drives all cores; None: one process for each core."""
    env: Mapping[str, str]
    """The ranks' environment."""
    changes: tuple[EnvChange, ...]
    """Differences between the ranks' environment and the kernel's."""
    target: Target
    """This machine, or the place that `--on` names."""
    shown_ranks: frozenset[int]
    """The ranks whose lines the cell shows."""
    vm: TpuVm | None = None
    """The machine that `--stop-when-done` stops."""
    told: set[object] = field(default_factory=set)
    """What the notes of earlier runs have told: the lines, or keys of those whose words change."""
    choice: BackendChoice | None = None
    """The backend, and why; None if it needs no note."""
    resumed_from: str | None = None
    """The run, folder or URL from whose last checkpoint the run continues."""
    call: LaunchCall | None = None
    """The call of `tpunb.launch`; None for a train cell."""

    @property
    def name(self) -> str:
        """The name that becomes part of the run's id."""
        return self.options.name or self.notebook.snapshot.name

    @property
    def world_size(self) -> int:
        if self.spmd is None:
            return self.cores
        return max(1, len(self.target.hosts))

    @property
    def restored(self) -> dict[str, str]:
        """Additional variables for the prelude, whose cells remove them from the environment."""
        removed = self.notebook.removed
        return {name: value for name, value in removed.items() if name not in self.env}

    def remote_env(self, run_id: str) -> dict[str, str]:
        """Return the variables for the ranks on the hosts of a place, besides the hosts' own."""
        shared = self.target.checkpoints(run_id)
        saved = {env_vars.CHECKPOINTS: shared} if shared else {}
        return {**saved, **self.env, **self.restored}

    def notes(self, spec: RunSpec) -> list[Note]:
        """Return the notes that are shown as the run begins, first its cost. From now on, they are
        told: those of an earlier run are minor.
        """
        notebook, lines = self.notebook, dict[object, str]()
        if self.spmd is not None:
            every = "all " if self.spmd.cores > 1 else ""
            why = f"SPMD: one process drives {every}{spec.cores()} ({self.spmd.why})"
            lines["SPMD"] = why
        if self.choice is not None:
            lines[self.choice.backend] = str(self.choice)
        own = [*notebook.snapshot.notes, *notebook.parameters.lines()]
        if spec.replicate is not None:
            own.append(f"every rank runs the prelude itself: {spec.replicate}")
        own += map(str, notebook.script.missing_changes)
        lines |= {line: line for line in (*own, *self.target.notes(notebook.script.text))}
        lines |= notebook.lint_lines()
        notes = [Note(text, minor=key in self.told) for key, text in lines.items()]
        self.told.update(lines)
        costs = cost.describe(self.target, self.options.timeout)
        return [*([Note(costs)] if costs else []), *notes]

    def spec(self, run_id: str) -> RunSpec:
        """Return the content of `spec.json` in the run folder."""
        options, target = self.options, self.target
        cwd, path = target.paths(import_path())
        blocks = tuple(
            replace(block, cwd=target.folder(block.cwd)) for block in self.notebook.script.blocks
        )
        return RunSpec(
            id=run_id,
            name=self.name,
            world_size=self.world_size,
            device=self.machine.device,
            backend=self.machine.backend,
            cwd=cwd,
            sys_path=path,
            blocks=blocks,
            returns=options.returns,
            grace=options.grace,
            timeout=options.timeout,
            hang_timeout=options.hang_timeout,
            retries=options.retries,
            price=target.price,
            replicate=self.notebook.replicate,
            spmd=None if self.spmd is None else self.cores,
            devices_per_chip=self.machine.devices_per_chip,
            profile=options.profile,
            restored=tuple(self.restored),
            resumed_from=self.resumed_from,
            hosts=target.hosts,
            place=target.place_name,
        )


def make_request(
    options: TrainOptions,
    notebook: PreparedNotebook,
    here: Machine,
    cores: int,
    *,
    runs: Path,
    target: Target,
) -> RunRequest:
    """Decide what the options, the notebook and the machine together determine.

    `here`: a machine of the target. `runs`: the folder in which `--resume` searches.

    Raises UsageError for an option that does not fit the notebook, and TpunbError for `--resume`.
    """
    if refusal := assigned.refusal(notebook.script, options.returns, notebook.parameters.names):
        raise UsageError(f"{options.written('returns')} {refusal}")
    asked, hosts = dict(options.env), max(1, len(target.hosts))
    env, changes = target.environment(asked)
    spmd = environment.spmd_environment(
        target.kernel, asked, here, cores // hosts, notebook.script.spmd
    )
    if spmd is not None:
        env, cores = dict(spmd.env), spmd.cores * hosts
        changes = () if target.hosts else spmd.changes
    ranks = cores if spmd is None else hosts
    shown = ranks_to_show(options.ranks, ranks, options.written("ranks"))
    resumed = None
    if options.resume is not None:
        env[env_vars.RESUME], resumed = find_checkpoints(
            options.resume, runs, notebook.snapshot.path, target
        )
    return RunRequest(
        options=options,
        notebook=notebook,
        machine=here,
        cores=cores,
        spmd=spmd,
        env=env,
        changes=changes,
        target=target,
        shown_ranks=shown,
        resumed_from=resumed,
    )


def find_checkpoints(
    resume: str, runs: Path, notebook: str | None, target: Target
) -> tuple[str, str]:
    """Return the checkpoints that `--resume` names, and the id of their run.

    If `resume` is a folder or URL, return it twice. `notebook`: the path of the notebook, for
    `last`; `target`: what must find the checkpoints. Raises TpunbError.
    """
    if "://" in resume:
        return resume, resume
    if Path(resume).is_dir() or (target.hosts and resume.startswith("/")):
        return (str(Path(resume).absolute()),) * 2
    run = _latest_saved(runs, notebook) if resume == LAST else directory.find_run(runs, resume)
    return target.resume(run), run.id


def _latest_saved(runs: Path, notebook: str | None) -> RunDir:
    """Return the latest run of a notebook that has saved a checkpoint."""
    for run in reversed(directory.list_runs(runs)):
        saved = any(run.path.glob("attempts/*/*/saving.txt")) and run.checkpoints.is_dir()
        # `...` equals no path: of a snapshot that cannot be read, nothing is known.
        if saved and records.read_dict(run.snapshot).get("path", ...) == notebook:
            return run
    raise TpunbError(
        f"--resume {LAST}: no run of this notebook in {runs} has saved a checkpoint"
        "; to continue another run, name it with --resume RUN (%tpu_runs lists all runs)"
    )


def describe_plan(request: RunRequest) -> str:
    """Return the plan that `--dry-run` shows: notebook, cells, cores, omissions, environment,
    findings of lint, and the script.
    """
    notebook, device = request.notebook, request.machine.device
    snapshot, script = notebook.snapshot, notebook.script
    kind = {"CPU": "rehearsal cores on CPU", "TPU": "TPU cores", "GPU": "GPUs"}[device]
    if request.target.hosts:
        kind = f"{kind} of {', '.join(request.target.hosts)} ({request.machine.kind})"
    lines = [
        f"notebook: {snapshot.path or 'no file'} (from {snapshot.origin})",
        *snapshot.notes,
        *notebook.parameters.lines(),
        *map(str, script.missing_changes),
        f"prelude: {_cell_numbers(script, 'prelude')}; train cell: "
        f"{_cell_numbers(script, 'train')}",
        f"{request.cores} {kind}; {_processes(request)}",
        f"backend: {LABELS[request.machine.backend]}",
    ]
    if left_out := [*_cells_left_out(snapshot), *_pieces_left_out(script)]:
        lines += ["left out:", *left_out]
    if request.changes:
        lines.append("differences between the ranks' environment and the kernel's:")
        for change in request.changes:
            what = "removed" if change.value is None else f"= {change.value}"
            lines.append(f"  {change.name} {what}  ({change.reason})")
    lines += _processors()
    if notebook.findings:
        lines.append("lint:")
        lines += [f"  {line}" for finding in notebook.findings for line in str(finding).split("\n")]
    return "\n".join([*lines, "", script.text.rstrip()])


def _processors() -> Iterator[str]:
    """Yield a line if the ranks get more processors than this thread of the kernel has."""
    allowed, pinned = cpus.allowed_cpus(), os.sched_getaffinity(0)
    if pinned != allowed:
        yield (
            f"processors: all {len(allowed)} of the kernel's process, although its main thread is "
            f"pinned to {len(pinned)} (by OpenMP, if OMP_PROC_BIND or the like is set)"
        )


def _processes(request: RunRequest) -> str:
    if request.spmd is not None:
        return f"SPMD: one process drives them all ({request.spmd.why})"
    if request.notebook.replicate:
        return f"every rank runs the prelude: {request.notebook.replicate}"
    return "the prelude runs once, then the ranks are forked"


def _cells_left_out(snapshot: Snapshot) -> Iterator[str]:
    """Yield a line for each cell that the run leaves out, with the cell's first line."""
    for cell, reason in snapshot.left_out:
        if cell.source.strip():
            number = " " if cell.number is None else cell.number
            yield f"  cell [{number}]: {cell.source.strip().splitlines()[0]}  ({reason})"


def _pieces_left_out(script: Script) -> Iterator[str]:
    """Yield a line for each statement that the conversion leaves out, with cell and line."""
    for omission in script.omissions:
        where = "" if omission.cell is None else f"cell [{omission.cell}], line {omission.line}: "
        text = omission.text.strip().splitlines()[0] if omission.text.strip() else ""
        yield f"  {where}{text}  ({omission.reason})"


def _cell_numbers(script: Script, role: str) -> str:
    blocks = (block for block in script.blocks if block.role == role)
    numbers = [f"[{block.number}]" for block in blocks if block.cell is not None]
    return " ".join(numbers) or "none"
