"""From a notebook's executed cells to a run that can start, and the plan that `--dry-run` shows.

Imports nbconvert, which takes two seconds: imported when a train cell needs it, or in the
background before.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from tpunb.kernel.held import HeldNames, read_kernel
from tpunb.kernel.options import TrainOptions
from tpunb.kernel.returned import Returned
from tpunb.machine import prices
from tpunb.machine.auto_stop import TpuVm
from tpunb.machine.environment import Change, SpmdEnvironment
from tpunb.machine.machine import Machine
from tpunb.notebook.capture.capture import capture
from tpunb.notebook.capture.history import History
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.fork_safety import static_reason
from tpunb.notebook.convert.kernel_names import names_read
from tpunb.notebook.convert.launches import with_call
from tpunb.notebook.lint.findings import Finding, LintError
from tpunb.notebook.lint.linter import lint
from tpunb.notebook.models import LaunchCall, Script, Snapshot
from tpunb.notebook.trial_cells import defer_parameters, reached_names, with_parameters
from tpunb.runs.kernel_values import KernelValues
from tpunb.runs.spec import RunSpec
from tpunb.utils import cpus, env_vars

if TYPE_CHECKING:
    from tpunb.places.target import Target

ASKED = "--replicate"
KNOWN_SINCE = (2, 9)
"""The torch_xla whose names lint knows: on an older one an error need not be one."""


@dataclass(frozen=True)
class PreparedNotebook:
    """A notebook at the moment its train cell runs: captured, converted and linted."""

    snapshot: Snapshot
    script: Script
    replicate: str | None
    """Why every rank must run the prelude itself; None: it runs once."""
    findings: tuple[Finding, ...]
    """What lint found, in the order of the notebook."""
    values: KernelValues | None = None
    """What the kernel holds of the names that the train cell reads; None: nothing comes from it."""
    removed: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that the prelude's cells removed in the kernel, and what they were."""

    def raise_for_lint(self, world_size: int) -> None:
        """Raise LintError where a run of so many ranks would surely fail."""
        certain = [f for f in self.findings if f.certain and (world_size > 1 or not f.several)]
        if certain and _torch_xla_version() >= KNOWN_SINCE:
            raise LintError(certain)

    def lint_note(self) -> str:
        """Lint's errors and warnings in a line; '' if there are none."""
        counts = Counter(finding.severity for finding in self.findings)
        if not counts["error"] + counts["warning"]:
            return ""
        kinds = ", ".join(
            f"{counts[kind]} {kind}{'s' if counts[kind] > 1 else ''}"
            for kind in ("error", "warning", "hint")
            if counts[kind]
        )
        severity = "error" if counts["error"] else "warning"
        worst = next(finding for finding in self.findings if finding.severity == severity)
        return (
            f"lint: {kinds} (--dry-run shows them). The first: cell [{worst.cell}], "
            f"line {worst.line}: {worst.message}"
        )


def prepare_notebook(
    history: History,
    cell: str | LaunchCall,
    *,
    notebook: str | None,
    user_ns: Mapping[str, object],
    returned: Returned,
    replicate: bool,
    replay: bool,
    parameters: Mapping[str, object] = MappingProxyType({}),
) -> PreparedNotebook:
    """Capture, convert and lint. Raises NotebookError and ConversionError.

    `cell` is the train cell's body, or a call of `tpunb.launch` in the cell that is running;
    `notebook` the path that the user gave; `returned` what the kernel has got from its runs;
    `replicate`: every rank runs the prelude, whatever it does; `replay`: nothing else comes from
    the kernel. `parameters` are values of a trial, for names that the kernel has too.
    """
    body = None if isinstance(cell, LaunchCall) else cell
    snapshot = capture(history, body, notebook=notebook, user_ns=user_ns)
    if isinstance(cell, LaunchCall):
        snapshot = with_call(snapshot, cell)
    if env_vars.SWEEP in os.environ:
        snapshot = defer_parameters(snapshot)
    if parameters:
        lines = [f"{name} = {value!r}" for name, value in parameters.items()]
        snapshot = with_parameters(snapshot, "\n".join(lines))
        user_ns = {**user_ns, **parameters}
    got, left = returned.by_cell(snapshot.cells), returned.left_by_launches(user_ns)
    if replay:
        script, values = convert(snapshot, got, left=left), None
    else:
        script = convert(snapshot, got, left=left, held=HeldNames(user_ns), parameters=True)
        names = names_read(script, snapshot, history.executions())
        if parameters:
            ours = reached_names(snapshot, parameters)
            names = tuple(name for name in names if name.name not in ours)
        values = read_kernel(names, user_ns)
    reason = ASKED if replicate else static_reason(script)
    prelude = {block.cell for block in script.blocks if block.role == "prelude"}
    executed = {n for c in snapshot.cells if c.index in prelude for n in c.executions}
    removed = history.removed_variables(executed)
    # Cells below are no part of the run, and most of them have not run.
    end = None if snapshot.train is None else snapshot.train + 1
    whole = replace(snapshot, cells=snapshot.cells[:end])
    findings = lint(whole, () if replay else HeldNames(user_ns))
    return PreparedNotebook(snapshot, script, reason, tuple(findings), values, removed)


def _torch_xla_version() -> tuple[int, ...]:
    """Major and minor, from the package's metadata: nothing is imported."""
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


@dataclass(frozen=True)
class RunRequest:
    """Everything that is decided before a run starts."""

    options: TrainOptions
    notebook: PreparedNotebook
    machine: Machine
    cores: int
    spmd: SpmdEnvironment | None
    """How one process drives all cores, if one does."""
    env: Mapping[str, str]
    """The ranks' environment."""
    changes: tuple[Change, ...]
    """How it differs from the kernel's."""
    shown_ranks: frozenset[int]
    """Those whose lines the cell shows."""
    vm: TpuVm | None = None
    """The machine that `--stop-when-done` shuts down."""
    lacks_tpu: bool = False
    """A cell asks for a TPU, and there is none."""
    notes_told: frozenset[str] = frozenset()
    """Notes on the notebook that an earlier run has said, and that say nothing of this one."""
    lint_told: bool = False
    """Whether an earlier run has said what lint finds."""
    resumed_from: str | None = None
    """The run, folder or URL whose last checkpoint it continues from."""
    call: LaunchCall | None = None
    """That of `tpunb.launch`; None for a train cell."""
    target: Target | None = None
    """The hosts of the place that `--on` names; None: it runs here."""

    @property
    def name(self) -> str:
        """The name that becomes part of the run's id."""
        return self.options.name or self.notebook.snapshot.name

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        if self.spmd is None:
            return self.cores
        return 1 if self.target is None else len(self.target.hosts)

    @property
    def restored(self) -> dict[str, str]:
        """What the prelude finds in its environment besides: its cells remove it once more."""
        removed = self.notebook.removed
        return {name: value for name, value in removed.items() if name not in self.env}

    def remote_env(self, run_id: str) -> dict[str, str]:
        """The variables that the hosts of a place give the ranks besides their own."""
        assert self.target is not None
        shared = self.target.checkpoints(run_id)
        saved = {} if shared is None else {env_vars.CHECKPOINTS: shared}
        return {**saved, **self.env, **self.restored}

    def raise_for_lint(self) -> None:
        """Raise LintError where the run would surely fail. Nothing has been started."""
        self.notebook.raise_for_lint(self.world_size)

    def notes(self, spec: RunSpec) -> Iterator[str]:
        """What the cell says before the run begins."""
        if self.spmd is not None:
            every = "all " if self.spmd.cores > 1 else ""
            yield f"SPMD: one process drives {every}{spec.cores()} ({self.spmd.why})"
        if self.lacks_tpu:
            yield "PJRT_DEVICE=TPU is ignored: there is no TPU here, so this is a rehearsal on CPU"
        yield from (note for note in self.notebook.snapshot.notes if note not in self.notes_told)
        yield from map(str, self.notebook.script.lacking)
        if not self.lint_told and (note := self.notebook.lint_note()):
            yield note
        if self.target is not None:
            yield from self.target.notes(self.notebook.script.text)

    def spec(self, run_id: str) -> RunSpec:
        """The part of it that goes into the run folder as `spec.json`."""
        options, target = self.options, self.target
        cwd, path = os.getcwd(), _import_path()
        if target is not None:
            cwd, path = target.paths(path)
        return RunSpec(
            id=run_id,
            name=self.name,
            world_size=self.world_size,
            device=self.machine.device,
            cwd=cwd,
            sys_path=path,
            blocks=self.notebook.script.blocks,
            returns=options.returns,
            grace=options.grace,
            timeout=options.timeout,
            hang_timeout=options.hang_timeout,
            retries=options.retries,
            price=prices.price_of(self.machine) if target is None else target.estimate.price,
            replicate=self.notebook.replicate,
            spmd=None if self.spmd is None else self.cores,
            devices_per_chip=self.machine.devices_per_chip,
            profile=options.profile,
            restored=tuple(self.restored),
            resumed_from=self.resumed_from,
            hosts=() if target is None else target.hosts,
            place="" if target is None else target.place.name,
        )


def _import_path() -> tuple[str, ...]:
    """`sys.path` without the temporary folder that torch.distributed adds for code of its own."""
    module = sys.modules.get("torch.distributed.nn.jit.instantiator")
    own = getattr(module, "INSTANTIATED_TEMPLATE_DIR_PATH", None)
    return tuple(entry for entry in sys.path if entry != own)


def describe_plan(request: RunRequest) -> str:
    """The plan that `--dry-run` shows: where the cells come from, what is left out, where it runs,
    what lint found, and the script.
    """
    notebook, device = request.notebook, request.machine.device
    snapshot, script = notebook.snapshot, notebook.script
    kind = "rehearsal cores on CPU" if device == "CPU" else "TPU cores"
    if request.target is not None:
        kind = f"{kind} of {', '.join(request.target.hosts)} ({request.machine.kind})"
    lines = [
        f"notebook: {snapshot.path or 'no file'} (from {snapshot.origin})",
        *snapshot.notes,
        *map(str, script.lacking),
        f"prelude: {_cell_numbers(script, 'prelude')}; train cell: "
        f"{_cell_numbers(script, 'train')}",
        f"{request.cores} {kind}; {_processes(request)}",
    ]
    if left_out := [*_cells_left_out(snapshot), *_pieces_left_out(script)]:
        lines += ["left out:", *left_out]
    if request.changes:
        lines.append("environment of the ranks, where it differs from the kernel's:")
        for change in request.changes:
            what = "removed" if change.value is None else f"= {change.value}"
            lines.append(f"  {change.name} {what}  ({change.reason})")
    lines += _processors()
    if notebook.findings:
        lines.append("lint:")
        lines += [f"  {line}" for finding in notebook.findings for line in str(finding).split("\n")]
    return "\n".join([*lines, "", script.text.rstrip()])


def _processors() -> Iterator[str]:
    """That the ranks get more processors than this thread of the kernel has, if so."""
    allowed, pinned = cpus.allowed_cpus(), os.sched_getaffinity(0)
    if pinned != allowed:
        yield (
            f"processors: the {len(allowed)} that the kernel was started with; its main thread is "
            f"pinned to {len(pinned)}, as OpenMP does where OMP_PROC_BIND or the like is set"
        )


def _processes(request: RunRequest) -> str:
    if request.spmd is not None:
        return f"SPMD: one process drives them all ({request.spmd.why})"
    if request.notebook.replicate:
        return f"every rank runs the prelude: {request.notebook.replicate}"
    return "the prelude runs once, then the ranks are forked"


def _cells_left_out(snapshot: Snapshot) -> Iterator[str]:
    """Whole cells that are not part of the notebook that is run, with their first lines."""
    for cell, reason in snapshot.left_out:
        if cell.source.strip():
            yield f"  {snapshot.label(cell)}: {cell.source.strip().splitlines()[0]}  ({reason})"


def _pieces_left_out(script: Script) -> Iterator[str]:
    """What the conversion leaves out, with cell and line."""
    for omission in script.omissions:
        where = "" if omission.cell is None else f"cell [{omission.cell}], line {omission.line}: "
        text = omission.text.strip().splitlines()[0] if omission.text.strip() else ""
        yield f"  {where}{text}  ({omission.reason})"


def _cell_numbers(script: Script, role: str) -> str:
    numbers = [f"[{block.number}]" for block in script.blocks if block.role == role]
    return " ".join(numbers) or "none"
