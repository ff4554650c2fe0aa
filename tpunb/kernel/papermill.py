"""`tpunb run`: run a whole notebook with papermill, and report its runs."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.kernel.options import Cores
from tpunb.notebook.parameters import parameter, refuse_unknown
from tpunb.runs import directory, logs, metrics, state
from tpunb.runs.spec import RunState
from tpunb.utils import env_vars
from tpunb.utils.ansi import clean
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import number

if TYPE_CHECKING:
    from papermill.exceptions import PapermillExecutionError

    from tpunb.runs.result import RunResult


LAST_LINES = 5.0
"""Seconds after an interrupt in which the last lines of runs that end with the kernel appear."""


def run_notebook(
    notebook: Path, output: Path | None, parameters: Mapping[str, str], cores: Cores | None
) -> int:
    """Run a notebook with papermill, and print a line for each run that it started.

    `parameters`: texts from the command line; `cores`: ranks of all runs, overriding the cells.
    Returns the exit status: 0 only if there was a run and all runs succeeded.
    """
    output = output or notebook.with_suffix(".out.ipynb")
    kernel = _kernel_name(notebook)
    refuse_unknown(notebook, parameters)
    with tempfile.NamedTemporaryFile("r", prefix="tpunb-ran-") as ran:
        variables = {
            env_vars.NOTEBOOK: str(notebook.absolute()),
            env_vars.RAN: ran.name,
            env_vars.CORES: None if cores is None else str(cores),
        }
        values = {name: parameter(text) for name, text in parameters.items()}
        with _environment(variables), _watched(Path(ran.name)):
            failure = _execute(notebook, output, values, kernel)
        folders = [directory.RunDir(line) for line in ran.read().splitlines()]
    if failure is not None:
        print(f"tpunb: {failure}", file=sys.stderr)
    elif not folders:
        print(f"tpunb: {notebook}: no cell ran %%tpu_train", file=sys.stderr)
    succeeded = [_report(folder) for folder in folders]
    return 0 if failure is None and folders and all(succeeded) else 1


def _execute(
    notebook: Path, output: Path, parameters: Mapping[str, Any], kernel: str
) -> str | None:
    """Run all cells with these parameters; return why not all of them ran, or None.

    Raises TpunbError for a folder that cannot be written.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillException, PapermillExecutionError

    _make_folder(output)
    try:
        papermill.execute_notebook(
            notebook,
            output,
            parameters=dict(parameters),
            kernel_name=kernel,
            language="python",
            progress_bar=False,
            log_output=False,
            # 40: errors only. ipykernel 7.4 warns about its own TCP sockets, which are local.
            extra_arguments=["--IPKernelApp.log_level=40"],
        )
    except KeyboardInterrupt:
        # nbclient's task ends with the kernel; asyncio would report its unretrieved exception.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    except PapermillExecutionError as error:
        return f"{notebook}, cell [{error.exec_count}]: {_reason(error, output)}"
    except (PapermillException, DeadKernelError) as error:
        return f"{notebook}: {str(error).strip()}"
    return None


def _report(folder: directory.RunDir) -> bool:
    """Wait until a run has ended and print its result; True if it succeeded."""
    # Runs with --bg end with the kernel, runs with --detach later.
    state.wait_for_end(folder)
    result = state.read_result(folder)
    if result is None:
        print(f"tpunb: {state.lost_message(folder)}", file=sys.stderr)
        return False
    print(_describe(result), flush=True)
    return result.state is RunState.SUCCEEDED


@contextmanager
def _watched(ran: Path) -> Iterator[None]:
    """Context manager: in a terminal, print the lines of all runs as they come."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(ran, over), name="tpunb-watch", daemon=True)
    watcher.start()
    try:
        yield
    except BaseException:
        over.set()
        watcher.join(LAST_LINES)  # a detached run may take hours
        raise
    over.set()
    watcher.join()


def _watch(ran: Path, over: threading.Event) -> None:
    """Follow the runs whose folders are listed in a file, in this order, until `over` is set."""
    seen = 0
    while True:
        last = over.is_set()  # checked first, so that the file is read once more after the end
        try:
            folders = ran.read_text().splitlines()
        except FileNotFoundError:  # removed after an interrupt
            return
        for line in folders[seen:]:
            folder = directory.RunDir(line)
            print(f"run {folder.id}", file=sys.stderr)
            for lines in logs.follow_lines(folder, logs.LogSearch()):
                print(*map(clean, lines), sep="\n", file=sys.stderr, flush=True)
        seen = len(folders)
        if last:
            return
        over.wait(state.POLL_INTERVAL)


def _reason(error: PapermillExecutionError, output: Path) -> str:
    """Return the error of a cell as the notebook shows it.

    IPython writes a UsageError to the cell's standard error, which papermill does not read.
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


def _kernel_name(notebook: Path) -> str:
    """Return the kernel that the notebook names, if it is installed; otherwise python3."""
    from jupyter_client.kernelspec import KernelSpecManager

    from tpunb.notebook.files import load_cells

    load_cells(notebook)  # raises a clear error for an invalid file; papermill's is a traceback
    metadata = json.loads(notebook.read_text(encoding="utf-8-sig")).get("metadata")
    name = ((metadata or {}).get("kernelspec") or {}).get("name", "")
    return name if name in KernelSpecManager().find_kernel_specs() else "python3"


def _make_folder(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TpunbError(f"cannot write {output}: {error.strerror}") from error


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Context manager: set variables for the notebook's kernel, which inherits the environment."""
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


def _describe(result: RunResult) -> str:
    """Return one line: name, state, cores, duration and last metrics (reduced over ranks)."""
    ended = f"{result.state} on {result.cores()} in {result.duration:.1f} s{result.lacks()}"
    last: dict[str, float] = {}
    for row in metrics.reduce_rows(metrics.read_rows(result.dir / "metrics.jsonl"), whole=True):
        last |= metrics.values_of(row)
    return " · ".join(
        [f"{result.name}: {ended}", *(f"{name} {number(value)}" for name, value in last.items())]
    )
