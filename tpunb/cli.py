"""The command `tpunb`: the same things for a terminal."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb import __version__, control, rundir, runs
from tpunb.errors import TpunbError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from papermill.exceptions import PapermillExecutionError

    from tpunb.models import RunResult


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status. Errors that tpunb raises on purpose are one message."""
    chosen = _parser().parse_args(arguments)
    try:
        status: int = chosen.do(chosen)
        sys.stdout.flush()
    except TpunbError as error:
        print(f"tpunb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tpunb: interrupted", file=sys.stderr)
        return 130  # as a shell has it
    except BrokenPipeError:  # `tpunb logs | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tpunb", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    convert = commands.add_parser("convert", help="the script that %%%%tpu_train would run")
    convert.add_argument("notebook", type=Path, metavar="NB.ipynb")
    convert.add_argument("-o", "--output", type=Path, metavar="OUT.py")
    convert.add_argument("--cell", metavar="N|ID", help="the train cell (the last %%%%tpu_train)")
    convert.set_defaults(do=_convert)

    run = commands.add_parser("run", help="run a notebook with papermill")
    run.add_argument("notebook", type=Path, metavar="NB.ipynb")
    run.add_argument("output", type=Path, nargs="?", metavar="OUT.ipynb")
    run.add_argument("-p", "--parameter", nargs=2, action="append", default=[],
                     metavar=("NAME", "VALUE"), help="for the cell tagged parameters")  # fmt: skip
    run.add_argument("--cores", type=_cores, metavar="N|all", help="ranks, whatever the cells say")
    run.set_defaults(do=_run)

    listing = commands.add_parser("runs", help="list the runs")
    listing.set_defaults(do=_runs)
    logs = commands.add_parser("logs", help="show the log of a run")
    logs.add_argument("run", nargs="?", metavar="RUN", help="an id or any part of it (the latest)")
    logs.add_argument("--rank", type=int, metavar="R", help="only this rank's lines")
    logs.add_argument("--tail", type=int, metavar="N", help="only the last N lines")
    logs.set_defaults(do=_logs)
    logs.add_argument("-f", "--follow", action="store_true",
                      help="go on as it grows, until the run has ended")  # fmt: skip
    stop = commands.add_parser("stop", help="stop a run, whoever started it, and wait for its end")
    stop.add_argument("run", nargs="?", metavar="RUN",
                      help="an id or any part of it (the latest that goes on)")  # fmt: skip
    stop.set_defaults(do=_stop)
    clean = commands.add_parser("clean", help="remove old runs; asks first")
    clean.add_argument("--older-than", type=_days, metavar="DAYS",
                       help="only those that ended so many days ago")  # fmt: skip
    clean.add_argument("--keep", type=_count, default=0, metavar="N",
                       help="not the N newest")  # fmt: skip
    clean.add_argument("-y", "--yes", action="store_true", help="remove without asking")
    clean.set_defaults(do=_clean)
    for command in (listing, logs, stop, clean):
        command.add_argument("--runs", type=Path, default=runs.default_folder(), metavar="DIR",
                             help="where run folders are (./runs)")  # fmt: skip
    return parser


def _convert(chosen: argparse.Namespace) -> int:
    from tpunb.notebook.files import read
    from tpunb.script.convert import convert

    script = convert(read(chosen.notebook, chosen.cell))
    if chosen.output is None:
        sys.stdout.write(script.text)
    else:
        with _writing(chosen.output):
            chosen.output.write_text(script.text, encoding="utf-8")
    return 0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TpunbError(f"cannot write {path}: {error.strerror}") from error


def _runs(chosen: argparse.Namespace) -> int:
    print(runs.table(chosen.runs))
    return 0


def _logs(chosen: argparse.Namespace) -> int:
    run = rundir.find(chosen.runs, chosen.run)
    if not chosen.follow:
        sys.stdout.write(runs.log(run, chosen.rank, chosen.tail))
        return 0
    for text in runs.follow(run, chosen.rank, chosen.tail):
        sys.stdout.write(text)
        sys.stdout.flush()
    print(f"tpunb: {control.ended(run)}", file=sys.stderr)
    return 0


def _stop(chosen: argparse.Namespace) -> int:
    for line in control.stop(control.living(chosen.runs, chosen.run), "stopped with tpunb stop"):
        print(line, flush=True)
    return 0


def _clean(chosen: argparse.Namespace) -> int:
    found = runs.old(chosen.runs, chosen.older_than, chosen.keep)
    if not found:
        print(f"There is nothing to remove in {chosen.runs}.")
        return 0
    print(runs.listing(found), flush=True)
    if not chosen.yes:
        if not sys.stdin.isatty():
            raise TpunbError("nothing was removed: there is no terminal to ask at; -y does not ask")
        if input(f"Remove from {chosen.runs}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 0
    runs.remove(found)
    print("Removed.")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    """Papermill with a look at the runs that the notebook made: 0 only if all succeeded."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillException, PapermillExecutionError

    output = chosen.output or chosen.notebook.with_suffix(".out.ipynb")
    kernel = _kernel(chosen.notebook)
    failed = False
    with tempfile.NamedTemporaryFile("r", prefix="tpunb-ran-") as ran:
        variables = {
            "TPUNB_NOTEBOOK": str(chosen.notebook.absolute()),
            "TPUNB_RAN": ran.name,
            "TPUNB_CORES": chosen.cores,
        }
        with _environment(variables):
            try:
                with _writing(output):
                    output.parent.mkdir(parents=True, exist_ok=True)
                papermill.execute_notebook(
                    chosen.notebook,
                    output,
                    parameters={name: _value(text) for name, text in chosen.parameter},
                    kernel_name=kernel,
                    language="python",
                    progress_bar=False,
                    log_output=False,
                )
            except PapermillExecutionError as error:
                failed = True
                where = f"{chosen.notebook}, cell [{error.exec_count}]"
                print(f"tpunb: {where}: {_reason(error, output)}", file=sys.stderr)
            except (PapermillException, DeadKernelError) as error:
                failed = True
                print(f"tpunb: {chosen.notebook}: {str(error).strip()}", file=sys.stderr)
        folders = [rundir.RunDir(line) for line in ran.read().splitlines()]
    for folder in folders:
        control.wait(folder)  # those with --bg end with the kernel, those with --detach later
        if (result := control.read_result(folder)) is None:
            failed = True
            print(f"tpunb: {control.lost(folder)}", file=sys.stderr)
        else:
            failed = failed or result.state != "succeeded"
            print(summary(result), flush=True)
    if not folders and not failed:
        print(f"tpunb: {chosen.notebook}: no cell ran %%tpu_train", file=sys.stderr)
    return 0 if folders and not failed else 1


def _reason(error: PapermillExecutionError, output: Path) -> str:
    """Why a cell has failed, as the notebook shows it.

    IPython writes a UsageError to the cell's standard error, where papermill does not look.
    """
    if error.traceback:
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback)).strip()
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    outputs = [
        out
        for cell in cells
        if cell.get("execution_count") == error.exec_count
        for out in cell["outputs"]
    ]
    return "".join("".join(out["text"]) for out in outputs if out.get("name") == "stderr").strip()


def _kernel(notebook: Path) -> str:
    """The kernel that the notebook names, if this machine has it; else this environment's."""
    from jupyter_client.kernelspec import KernelSpecManager

    from tpunb.notebook.files import load

    load(notebook)  # says what is wrong, where papermill would show a traceback
    metadata = json.loads(notebook.read_text(encoding="utf-8-sig")).get("metadata", {})
    name = metadata.get("kernelspec", {}).get("name", "")
    return name if name in KernelSpecManager().find_kernel_specs() else "python3"


def _cores(text: str) -> str:
    if text != "all" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores (or 'all')")
    return text


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return days


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _value(text: str) -> Any:
    """A parameter: a Python literal (3, 1e-3, True, [1, 2]), else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Variables for the notebook's kernel, which inherits this process's environment."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def summary(result: RunResult) -> str:
    """One line: what ran, on what, how it ended, and its last metrics (mean of the ranks)."""
    line = f"{result.name}: {result.state} on {result.cores()} in {result.duration:.1f} s"
    metrics = result.metrics()
    names = [name for name in metrics.columns if name not in ("step", "rank", "time")]
    means = metrics.groupby("step")[names].mean() if names else metrics
    last = [f"{name} {means[name].dropna().iloc[-1]:.4g}" for name in names]
    return " · ".join([line, *last])
