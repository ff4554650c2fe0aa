"""The command line `tpunb`: the magics' functions for a terminal."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tpunb import data
from tpunb.data import DataOptions
from tpunb.errors import TpunbError
from tpunb.kernel.options import (
    Cores,
    LogsOptions,
    RunsOptions,
    StopOptions,
    cores,
    ranks_option,
    run_argument,
)
from tpunb.runs import bucket_copies, directory, logs, state
from tpunb.runs import listing as listings
from tpunb.runs.spec import BackendName, StopOrigin
from tpunb.utils import ansi, terminal
from tpunb.utils.options import (
    OptionParser,
    add_options,
    argument,
    build_options,
    flag,
    option,
    parse_count,
)
from tpunb.utils.version import __version__

if TYPE_CHECKING:
    from tpunb.notebook.lint.findings import Finding
    from tpunb.runs.result import Diagnosis

_Options = TypeVar("_Options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. A TpunbError is printed as one message."""
    namespace = make_parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and logs may contain any characters
        sys.stdout.reconfigure(errors="replace")
    try:
        status: int = namespace.do(namespace)
        sys.stdout.flush()
    except TpunbError as error:
        print(f"tpunb: {ansi.visible(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tpunb: interrupted", file=sys.stderr)
        return 130  # the status that shells use for an interrupt
    except BrokenPipeError:  # the reader has closed the pipe, as in `tpunb logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `tpunb` and all its commands."""
    parser = OptionParser(
        prog="tpunb",
        description="Train PyTorch models on TPUs: check, run and watch notebooks from a terminal.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, options: type[_Options], do: Callable[[_Options], int], help: str) -> None:
        """Add a command: `do` is called with its options and returns the exit status."""
        description = f"{help[0].upper()}{help[1:]}.".replace("%%", "%")
        command_parser = commands.add_parser(name, help=help, description=description)
        add_options(command_parser, options)
        command_parser.set_defaults(do=lambda namespace: do(build_options(options, namespace)))

    add("doctor", DoctorOptions, _doctor, "show the environment and its problems")
    add("convert", ConvertOptions, _convert, "write the script that %%%%tpu_train would run")
    add("run", RunOptions, _run, "run a notebook with papermill")
    add("lint", LintOptions, _lint, "find what would fail, hang or be slow on a TPU")
    add("diagnose", DiagnoseOptions, _diagnose, "find causes and fixes for a log")
    add(
        "submit",
        SubmitOptions,
        _submit,
        "run a notebook's train cell at a place of places.toml, and follow it",
    )
    add("attach", AttachCommandOptions, _attach, "follow a run to its end, wherever it runs")
    add("fetch", FetchOptions, _fetch, "copy files of a run from the hosts that it ran on")
    add("runs", RunsCommandOptions, _runs, "list the runs, newest first")
    add("logs", LogsCommandOptions, _logs, "show or search the log of a run")
    add(
        "stop",
        StopCommandOptions,
        _stop,
        "stop a run, whoever started it, and wait until it has ended",
    )
    add("node", NoOptions, _node, "run one host's part of a run, for tpunb's supervisor")
    add("clean", CleanOptions, _clean, "remove old runs, after a confirmation")
    add("keep", NoOptions, _keep, "keep this machine running: cancel --stop-when-done")
    add("data", DataOptions, _data, data.HELP)
    return parser


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return days


def _folder(text: str) -> Path:
    if bucket_copies.is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, which only `tpunb runs` and `tpunb logs` can read"
        )
    return Path(text)


def _folder_or_url(text: str) -> Path:
    try:
        return bucket_copies.cached_runs(text) if bucket_copies.is_url(text) else Path(text)
    except TpunbError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class _RunsFolder:
    """Options of commands that read run folders."""

    runs: Path = option(
        "--runs",
        type=_folder,
        default=listings.default_folder,
        metavar="DIR",
        help="where run folders are (default: ./runs)",
    )


def _runs_anywhere() -> Any:
    """Return `--runs` for commands that only read: a folder or a URL."""
    return option(
        "--runs",
        type=_folder_or_url,
        default=listings.default_folder,
        metavar="DIR",
        help="where run folders are: a folder or a URL such as gs://bucket/runs (default: ./runs)",
    )


@dataclass(frozen=True)
class _NotebookOptions:
    """Options of commands that read a notebook as `%%tpu_train` does."""

    notebook: Path = argument("NB.ipynb", help="the notebook", required=True, type=Path)
    cell: str | None = option(
        "--cell",
        metavar="N|ID",
        help="its train cell, by number or id (default: the last %%%%tpu_train)",
    )


@dataclass(frozen=True)
class DoctorOptions(_RunsFolder):
    """Options of `tpunb doctor`."""

    json: bool = flag("--json", help="print the environment as JSON")
    on: str | None = option(
        "--on",
        metavar="PLACE",
        help="check every host of this place of places.toml",
    )


def _doctor(chosen: DoctorOptions) -> int:
    """Return 1 if there is a problem."""
    if chosen.on is not None:
        return _doctor_on(chosen.on, chosen.json)
    from tpunb.display.doctor_report import report_text
    from tpunb.machine import doctor

    report = doctor.inspect_machine(os.environ, runs=chosen.runs)
    if chosen.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print(terminal.coloured(report_text(report)))
    return 1 if report.problems else 0


def _doctor_on(place: str, as_json: bool) -> int:
    from tpunb.places.check import inspect_place

    report = inspect_place(place, Path.cwd())
    print(json.dumps(report.to_json(), indent=1) if as_json else str(report))
    return 1 if report.problems() else 0


@dataclass(frozen=True)
class ConvertOptions(_NotebookOptions):
    """Options of `tpunb convert`."""

    output: Path | None = option(
        "-o",
        "--output",
        type=Path,
        metavar="OUT.py",
        help="the file to write (default: standard output)",
    )
    no_setup: bool = flag(
        "--no-setup",
        help="leave out lines that prepare the machine: !pip, %%env, %%%%writefile, …",
    )


def _convert(chosen: ConvertOptions) -> int:
    from tpunb.notebook.convert.convert import convert
    from tpunb.notebook.files import load_snapshot
    from tpunb.notebook.models import Export

    export = Export.WITHOUT_SETUP if chosen.no_setup else Export.WITH_SETUP
    script = convert(load_snapshot(chosen.notebook, chosen.cell), export=export)
    for requirement in script.requirements:
        print(f"tpunb: {requirement}", file=sys.stderr)
    if chosen.output is None:
        sys.stdout.write(script.text)
    else:
        try:
            chosen.output.write_text(script.text, encoding="utf-8")
        except OSError as error:
            raise TpunbError(f"cannot write {chosen.output}: {error.strerror}") from error
    return 0


@dataclass(frozen=True)
class LintOptions:
    """Options of `tpunb lint`."""

    notebooks: tuple[Path, ...] = argument(
        "NB.ipynb", help="one or more notebooks", several=True, type=Path
    )
    cell: str | None = option(
        "--cell",
        metavar="N|ID",
        help="if there is one notebook: its train cell, by number or id (default: the last "
        "%%%%tpu_train)",
    )
    backend: BackendName | None = option(
        "--backend",
        metavar="NAME",
        choices=("xla", "torchtpu", "torch"),
        help="what the notebook trains with: xla (torch_xla), torchtpu, or torch (plain "
        "torch.distributed); default: what its code names, otherwise xla",
    )
    json: bool = flag("--json", help="print the findings as JSON")


def _lint(chosen: LintOptions) -> int:
    from tpunb.notebook.convert.stack import written_for
    from tpunb.notebook.files import load_snapshot
    from tpunb.notebook.lint.linter import lint

    several = len(chosen.notebooks) > 1
    if several and chosen.cell is not None:
        raise TpunbError(
            "--cell names the train cell of one notebook, but several notebooks are given: lint "
            "that notebook alone"
        )
    found: list[tuple[Path, Finding]] = []
    unread = False
    for path in chosen.notebooks:
        try:
            snapshot = load_snapshot(path, chosen.cell)
            code = [cell.source for cell in snapshot.cells if cell.kind == "code"]
            findings = lint(snapshot, backend=chosen.backend or written_for(code) or "xla")
        except TpunbError as error:
            if not several:
                raise
            print(f"tpunb: {error}", file=sys.stderr)
            unread = True
            continue
        found += ((path, finding) for finding in findings)
        if several and findings and not chosen.json:
            print(terminal.coloured(terminal.join("\n\n", [f"{path}:", *map(str, findings)])))
            print()
    every = [finding for _, finding in found]
    if chosen.json:
        named = [({"notebook": str(path)} if several else {}) | f.to_json() for path, f in found]
        print(json.dumps(named, indent=1))
    else:
        parts = [*([] if several else map(str, every)), _count(every)]
        print(terminal.coloured(terminal.join("\n\n", parts)))
    return 1 if unread or any(finding.severity == "error" for finding in every) else 0


def _count(findings: Sequence[Finding]) -> str:
    if not findings:
        return "No problems found."
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items())


@dataclass(frozen=True)
class DiagnoseOptions:
    """Options of `tpunb diagnose`."""

    log: str = argument("LOG", help="a log file, or - for standard input", required=True)
    returncode: int | None = option(
        "--returncode", type=int, metavar="N", help="the exit code of the process"
    )
    json: bool = flag("--json", help="print the causes as JSON")


def _diagnose(chosen: DiagnoseOptions) -> int:
    """Return 1 if the failure has no known cause: then the most relevant lines are printed."""
    from tpunb.diagnostics.failure import diagnose, most_relevant_lines
    from tpunb.diagnostics.failure.run import diagnose_log, read_end

    path = Path(chosen.log)
    diagnoses: list[Diagnosis] | None
    if path.is_file():
        text, diagnoses = read_end(path), diagnose_log(path, chosen.returncode)
    else:
        if chosen.log == "-" and sys.stdin is not None:
            data = sys.stdin.buffer.read()
        elif path.is_fifo():  # <(command) in a shell
            data = path.read_bytes()
        else:
            raise TpunbError(f"there is no log {chosen.log!r}")
        text = data.decode("utf-8", "replace")
        diagnoses = None if chosen.returncode == 0 else diagnose(text, chosen.returncode)
    if chosen.json:
        print(json.dumps([diagnosis.to_json() for diagnosis in diagnoses or ()], indent=1))
    elif diagnoses is None:
        print("The program ended with exit code 0: the log shows no failure.")
    elif diagnoses:
        print(terminal.coloured(terminal.join("\n\n", map(str, diagnoses))))
    else:
        lines = most_relevant_lines(text)
        print("No known cause. The most relevant lines:" if lines else "The log is empty.")
        print(terminal.coloured("\n".join(f"  | {line}" for line in lines)))
    return 1 if diagnoses == [] else 0


def _parameters_option() -> Any:
    return option(
        "-p",
        "--parameter",
        repeatable=True,
        metavar=("NAME", "VALUE"),
        help="set a variable of the cell tagged parameters (repeatable)",
    )


@dataclass(frozen=True)
class RunOptions:
    """Options of `tpunb run`."""

    notebook: Path = argument("NB.ipynb", help="the notebook", required=True, type=Path)
    output: Path | None = argument(
        "OUT.ipynb", help="the executed notebook (default: NB.out.ipynb)", type=Path
    )
    parameters: tuple[tuple[str, str], ...] = _parameters_option()
    cores: Cores | None = option(
        "--cores", type=cores, metavar="N|all", help="ranks of all runs; overrides the cells"
    )


def _run(chosen: RunOptions) -> int:
    from tpunb.kernel.papermill import run_notebook

    return run_notebook(chosen.notebook, chosen.output, dict(chosen.parameters), chosen.cores)


@dataclass(frozen=True)
class SubmitOptions(_RunsFolder, _NotebookOptions):
    """Options of `tpunb submit`."""

    on: str = option("--on", metavar="PLACE", help="a place of places.toml", required=True)
    parameters: tuple[tuple[str, str], ...] = _parameters_option()
    detach: bool = flag(
        "--detach", help="return once the run has started; `tpunb attach` follows it"
    )
    dry_run: bool = flag("--dry-run", help="show the plan and the script, run nothing")
    yes: bool = flag(
        "--yes", help="start without a confirmation, even if it may cost more than ask_above"
    )
    manifest: bool = flag(
        "--manifest",
        help="for a place of kind jobset: print the Kubernetes objects that kubectl runs",
    )


def _submit(chosen: SubmitOptions) -> int:
    from tpunb.kernel.submit import print_manifest, submit

    if chosen.manifest:
        if chosen.detach or chosen.dry_run:
            raise TpunbError(
                "--manifest starts nothing: it cannot be combined with --detach or --dry-run"
            )
        parameters = dict(chosen.parameters)
        return print_manifest(chosen.notebook, chosen.cell, parameters, chosen.on)
    return submit(
        chosen.notebook,
        chosen.cell,
        dict(chosen.parameters),
        chosen.on,
        chosen.runs,
        detach=chosen.detach,
        dry_run=chosen.dry_run,
        yes=chosen.yes,
    )


@dataclass(frozen=True)
class AttachCommandOptions(_RunsFolder):
    """Options of `tpunb attach`."""

    run: str | None = run_argument("the latest active run")
    ranks: str = ranks_option("")


def _attach(chosen: AttachCommandOptions) -> int:
    from tpunb.kernel.submit import attach

    return attach(chosen.runs, chosen.run, chosen.ranks)


@dataclass(frozen=True)
class FetchOptions(_RunsFolder):
    """Options of `tpunb fetch`."""

    run: str | None = run_argument("the latest")
    patterns: tuple[str, ...] = option(
        "--files",
        repeatable=True,
        metavar="PATTERN",
        help="files or folders in its run folder (repeatable; default: checkpoints)",
    )


def _fetch(chosen: FetchOptions) -> int:
    from tpunb.kernel.submit import fetch

    return fetch(chosen.runs, chosen.run, chosen.patterns or ("checkpoints",))


@dataclass(frozen=True)
class RunsCommandOptions(RunsOptions):
    """Options of `tpunb runs`."""

    runs: Path = _runs_anywhere()


def _runs(chosen: RunsCommandOptions) -> int:
    print(terminal.coloured(str(listings.list_runs(chosen.runs, whole=chosen.whole))))
    return 0


@dataclass(frozen=True)
class LogsCommandOptions(_RunsFolder, LogsOptions):
    """Options of `tpunb logs`: those of `%tpu_logs`, and --follow."""

    runs: Path = _runs_anywhere()
    follow: bool = flag("-f", "--follow", help="print new lines as they come, until the run ends")


def _logs(chosen: LogsCommandOptions) -> int:
    run = directory.find_run(chosen.runs, chosen.run)
    bucket_copies.load_log(run)
    search = chosen.search()
    shown = ansi.clean if sys.stdout.isatty() else str  # files get the ranks' exact output
    if not chosen.follow:
        any_line = False
        for line in logs.read_lines(run, search):
            any_line = True
            sys.stdout.write(f"{shown(line)}\n")
        if not any_line and search.tail != 0:
            print(f"tpunb: {logs.no_match_message(run, search)}", file=sys.stderr)
        return 0
    for lines in logs.follow_lines(run, search):
        sys.stdout.write("".join(f"{shown(line)}\n" for line in lines))
        sys.stdout.flush()
    print(f"tpunb: {state.describe_end(run)}", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class StopCommandOptions(_RunsFolder, StopOptions):
    """Options of `tpunb stop`."""


def _stop(chosen: StopCommandOptions) -> int:
    from tpunb.kernel import runs

    for line in runs.stop(chosen.runs, chosen.run, "tpunb stop", StopOrigin.COMMAND):
        print(line, flush=True)
    return 0


def _node(chosen: NoOptions) -> NoReturn:
    from tpunb.kernel import node

    node.run_node()


@dataclass(frozen=True)
class CleanOptions(_RunsFolder):
    """Options of `tpunb clean`."""

    older_than: float | None = option(
        "--older-than",
        type=_days,
        metavar="DAYS",
        help="remove only runs that ended at least this many days ago",
    )
    keep: int = option(
        "--keep", type=parse_count, default=0, metavar="N", help="keep the N newest runs"
    )
    yes: bool = flag("-y", "--yes", help="remove without a confirmation")


def _clean(chosen: CleanOptions) -> int:
    old = listings.find_old(chosen.runs, chosen.older_than, chosen.keep)
    if not old:
        print(f"There is nothing to remove in {chosen.runs}.")
        return 0
    print(terminal.coloured(listings.describe_removal(old)), flush=True)
    if not chosen.yes:
        if not sys.stdin.isatty():
            raise TpunbError(
                "nothing was removed: standard input is not a terminal, so the confirmation "
                "cannot be given; add -y to remove without it"
            )
        if input(f"Remove from {chosen.runs}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 0
    listings.remove_runs(old)
    print("Removed.")
    return 0


@dataclass(frozen=True)
class NoOptions:
    """Options of commands that have none."""


def _keep(chosen: NoOptions) -> int:
    from tpunb.machine.auto_stop import keep_running

    print(keep_running())
    return 0


def _data(chosen: DataOptions) -> int:
    data.run(chosen, print)
    return 0
