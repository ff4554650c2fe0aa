"""`tpunb submit`, `attach` and `fetch`: run a train cell at a place, without a kernel."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from IPython.core.error import UsageError
from IPython.utils.text import DollarFormatter
from nbformat import NotebookNode

from tpunb.backends.choice import BackendChoice
from tpunb.display.html import LEAVE
from tpunb.display.run_view import RunView
from tpunb.kernel import cost, pipeline
from tpunb.kernel.backend_choice import choose_for
from tpunb.kernel.launcher import Attached
from tpunb.kernel.options import TRAIN, TrainOptions
from tpunb.kernel.prepare import check_options
from tpunb.kernel.runs import Runs, find_attached, follow_attached
from tpunb.machine import machine
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.errors import NotebookError
from tpunb.notebook.files import load_snapshot
from tpunb.notebook.models import Export, Snapshot
from tpunb.notebook.parameters import literal_values, parameter, refuse_unknown
from tpunb.places import jobset, kaggle, transfer
from tpunb.places.config import JobSetSettings, KaggleSettings, find_place
from tpunb.places.hosts_target import Target, find_hosts
from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState, Stop, StopOrigin
from tpunb.utils import env_vars
from tpunb.utils.errors import TpunbError
from tpunb.utils.interrupts import counted_interrupts
from tpunb.utils.text import parse_ranks

_INTERRUPTED = Stop(reason="interrupted in the terminal", origin=StopOrigin.COMMAND)


def submit(
    notebook: Path,
    cell: str | None,
    parameters: Mapping[str, str],
    place: str,
    runs: Path,
    *,
    detach: bool,
    dry_run: bool,
    yes: bool,
) -> int:
    """Run the notebook's train cell, with the options of its option line, at a place.

    On Kaggle, run the whole notebook. Returns the exit status: 0 if the run has succeeded, or,
    with `detach`, if it was started.
    """
    if isinstance((config := find_place(place, Path.cwd())).settings, KaggleSettings):
        if cell is not None:
            raise TpunbError("--cell: Kaggle runs the whole notebook")
        node = _read(notebook, parameters)
        return kaggle.run_notebook(
            node, notebook.stem, config, runs, detach=detach, dry_run=dry_run
        )
    snapshot = _load(notebook, cell, parameters)
    options = _options(snapshot)
    options = replace(options, on=place, detach=detach, dry_run=dry_run, yes=yes or options.yes)
    target = find_hosts(place, Path.cwd(), print, lambda: False)
    request = _prepare(snapshot, options, target, runs)
    if dry_run:
        print(pipeline.describe_plan(request))
        return 0
    own = Runs(_INTERRUPTED)
    # A KeyboardInterrupt would remove the folder of a run that has already begun.
    with counted_interrupts() as interrupts, closing(own):
        run = own.start(request, runs, interrupts, _ask, "tpunb submit --yes")
        if isinstance(run, Attached):
            if costs := cost.describe(target, options.timeout):
                print(costs)
            print(f"run {run.dir.id} continues on {run.spec.cores()}: tpunb attach {run.dir.id}")
            return 0
        notes = request.notes(run.spec)
        view = RunView(run.spec, run.dir, logs=request.shown_ranks, stop="", notes=notes)
        return _exit_status(own.follow(run, view, request, interrupts))


def _ask(prompt: str) -> str:
    """Call `cost.ask`; raise EOFError if standard input is not a terminal."""
    if not sys.stdin.isatty():
        raise EOFError
    return cost.ask(prompt)


def print_manifest(
    notebook: Path, cell: str | None, parameters: Mapping[str, str], place: str
) -> int:
    """Print the Kubernetes objects that run the notebook up to its train cell in a cluster.

    `place`: of kind "jobset". Nothing is started, and no local run folder is created.
    """
    config = find_place(place, Path.cwd())
    if not isinstance(settings := config.settings, JobSetSettings):
        raise TpunbError(f'--manifest: place {place} is of kind "{config.kind}", not "jobset"')
    snapshot = _load(notebook, cell, parameters)
    options = _options(snapshot)
    choice = _backend(snapshot)
    backend = choice.backend
    ranks = settings.hosts * jobset.ranks_of_host(settings, backend)
    prepared = pipeline.prepare_file(snapshot, replicate=False, backend=backend, ranks=ranks)
    prepared.raise_for_lint()
    if options.cores not in (None, "all", ranks):
        raise TpunbError(
            f"--cores {options.cores}: place {place} has {ranks}, which start together"
        )
    variables = dict(options.env)
    if options.resume is not None:
        if "://" not in options.resume:
            raise TpunbError(f"--resume {options.resume}: give the URL of the checkpoints")
        variables[env_vars.RESUME] = options.resume
    script = convert(snapshot, export=Export.WITH_SETUP)
    text = jobset.write_manifest(
        config,
        jobset.name_run(options.name or snapshot.name),
        script.text,
        variables,
        backend=backend,
        spmd=script.spmd is not None,
        grace=options.grace,
        restarts=options.retries,
        timeout=options.timeout,
    )
    print(text, end="")
    notes = [choice, *script.requirements]
    if options.returns or options.profile:
        notes.append("what --returns and --profile bring back stays in the pods: save to a bucket")
    for note in notes:
        print(f"tpunb: {note}", file=sys.stderr)
    return 0


def attach(runs: Path, wanted: str | None, ranks: str) -> int:
    """Follow a run, wherever it runs, from its first line to its end; Ctrl-C only detaches."""
    run = find_attached(runs, wanted)
    try:
        shown = parse_ranks(ranks, run.spec.world_size)
    except ValueError as error:
        raise TpunbError(f"--ranks: {error}") from None
    view = RunView(run.spec, run.dir, logs=shown, stop=LEAVE)
    with counted_interrupts() as interrupts:
        result = follow_attached(run, view, interrupts)
    if result is None:
        name = run.dir.id
        print(
            f"run {name} is still running (`tpunb attach {name}` follows it); "
            f"`tpunb stop {name}` stops it"
        )
        return 0
    return _exit_status(result)


def _exit_status(result: RunResult) -> int:
    if result.state is RunState.SUCCEEDED:
        return 0
    print(str(result), file=sys.stderr)
    return 1


def _read(notebook: Path, parameters: Mapping[str, str]) -> NotebookNode:
    """Read the notebook, with the values of `parameters` as papermill injects them."""
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    node: NotebookNode = load_notebook_node(str(notebook))
    if not parameters:
        return node
    refuse_unknown(notebook, parameters)
    values = {name: parameter(text) for name, text in parameters.items()}
    node = parameterize_notebook(node, values, kernel_name="python3", language="python")
    return node


def _load(notebook: Path, cell: str | None, parameters: Mapping[str, str]) -> Snapshot:
    """Load the notebook and insert the values of `parameters` as papermill does."""
    if not parameters:
        snapshot = load_snapshot(notebook, cell)
    else:
        import nbformat

        made = _read(notebook, parameters)
        with tempfile.NamedTemporaryFile("w", suffix=".ipynb", prefix="tpunb-") as file:
            nbformat.write(made, file)
            file.flush()
            snapshot = load_snapshot(file.name, cell)
        snapshot = replace(snapshot, path=str(notebook.absolute()), name=notebook.stem)
    if snapshot.train is None:
        raise NotebookError(f"{notebook} has no %%tpu_train cell: choose a cell with --cell N|ID")
    return snapshot


def _options(snapshot: Snapshot) -> TrainOptions:
    """Parse the train cell's own option line, in which parameters' literal values are known."""
    assert snapshot.train is not None
    first, _, _ = snapshot.cells[snapshot.train].source.lstrip().partition("\n")
    if not first.startswith("%%tpu_train"):
        return TrainOptions()
    line, known = first.removeprefix("%%tpu_train"), literal_values(snapshot)
    with suppress(Exception):  # IPython leaves a line as it is if a name of it is unknown
        line = DollarFormatter().vformat(line, (), known)
    unknown = (
        "{name!r} is not known before the run, only parameters with a literal value are: assign "
        "it in the cell tagged `parameters`, or give it with -p"
    )
    try:
        return TRAIN.parse_line(line, known, unknown)
    except UsageError as error:
        raise TpunbError(str(error)) from None


def _backend(snapshot: Snapshot) -> BackendChoice:
    code = [(cell.number, cell.source) for cell in snapshot.cells if cell.kind == "code"]
    return choose_for(None, code)


def _prepare(
    snapshot: Snapshot, options: TrainOptions, target: Target, runs: Path
) -> pipeline.RunRequest:
    backend = _backend(snapshot).backend
    here = machine.detect_machine(os.environ).with_backend(backend)

    try:
        chosen, cores = check_options(options, target, here)
        notebook = pipeline.prepare_file(
            snapshot, replicate=options.replicate, backend=backend, ranks=cores
        )
        return pipeline.make_request(options, notebook, chosen, cores, runs=runs, target=target)
    except UsageError as error:
        raise TpunbError(str(error)) from None


def fetch(runs: Path, wanted: str | None, patterns: tuple[str, ...]) -> int:
    """Copy files of a run from its hosts into its local folder, and print their paths."""
    run = directory.find_run(runs, wanted)
    for path in fetch_files(run, patterns):
        print(path)
    return 0


def fetch_files(run: RunDir, patterns: tuple[str, ...]) -> list[Path]:
    """Copy files like `fetch`, and return their paths.

    Raises TpunbError for a run on this machine, and if the copy fails.
    """
    try:
        return transfer.fetch_files(run, patterns)
    except OSError as error:
        where = error.filename or run.path
        raise TpunbError(f"cannot write {where}: {error.strerror or error}") from error
