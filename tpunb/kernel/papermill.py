"""`tpunb run`: a whole notebook with papermill, and how its runs ended."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.kernel.options import Cores
from tpunb.notebook.parameters import parameter, refuse_unknown
from tpunb.runs import directory, logs, metrics, state
from tpunb.runs.spec import RunState
from tpunb.utils import env_vars
from tpunb.utils.ansi import clean
from tpunb.utils.errors import TpunbError

if TYPE_CHECKING:
    from papermill.exceptions import PapermillExecutionError

    from tpunb.runs.result import RunResult


def run_notebook(
    notebook: Path, output: Path | None, parameters: Mapping[str, str], cores: Cores | None
) -> int:
    """Run a notebook with papermill, and print a line for each run that it made.

    `parameters`: their texts, as given on the command line; `cores`: ranks of all runs, whatever
    the cells say. Returns the exit status: 0 only if there was a run and all succeeded.
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
        with environment(variables), _watched(Path(ran.name)):
            failure = execute(notebook, output, values, kernel)
        folders = [directory.RunDir(line) for line in ran.read().splitlines()]
    if failure is not None:
        print(f"tpunb: {failure}", file=sys.stderr)
    elif not folders:
        print(f"tpunb: {notebook}: no cell ran %%tpu_train", file=sys.stderr)
    succeeded = [_report(folder) for folder in folders]
    return 0 if failure is None and folders and all(succeeded) else 1


@dataclass(frozen=True)
class NotebookFailure:
    """Why not all cells of a notebook ran."""

    where: str
    """The notebook, and the cell if one failed."""
    reason: str
    """Its traceback, or what papermill says."""
    headline: str
    """The same in a line."""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def execute(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, Any],
    kernel: str | None = None,
    **options: Any,
) -> NotebookFailure | None:
    """Run all cells with these parameters; why that failed, or None.

    `kernel`: its name; by default what `_kernel_name` says. `options`: nbclient's.
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
            kernel_name=kernel or _kernel_name(notebook),
            language="python",
            progress_bar=False,
            log_output=False,
            # ipykernel 7.4 warns of its own TCP sockets, which are this machine's. What it calls
            # an error is shown.
            extra_arguments=["--IPKernelApp.log_level=40"],
            **options,
        )
    except KeyboardInterrupt:
        # nbclient's task ends with the kernel, and nobody asks for its exception.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    except PapermillExecutionError as error:
        cell = f"cell [{error.exec_count}]"
        reason = _reason(error, output)
        said = f"{error.ename}: {error.evalue}" if error.traceback else reason
        headline, _, _ = said.strip().partition("\n")
        return NotebookFailure(f"{notebook}, {cell}", reason, f"{cell}: {headline}")
    except (PapermillException, DeadKernelError) as error:
        reason = str(error).strip()
        return NotebookFailure(str(notebook), reason, reason.partition("\n")[0])
    return None


def warm_up() -> None:
    """Import what running a notebook needs."""
    import papermill.execute  # noqa: F401
    from nbclient.exceptions import DeadKernelError  # noqa: F401


def _report(folder: directory.RunDir) -> bool:
    """Wait for a run's end and print how it ended; True if it succeeded."""
    # Runs with --bg end with the kernel, those with --detach later.
    state.wait_for_end(folder)
    result = state.read_result(folder)
    if result is None:
        print(f"tpunb: {state.lost_message(folder)}", file=sys.stderr)
        return False
    print(_describe(result), flush=True)
    return result.state is RunState.SUCCEEDED


@contextmanager
def _watched(ran: Path) -> Iterator[None]:
    """Print the lines of all runs as they come, in a terminal; elsewhere the notebook has them."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(ran, over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(ran: Path, over: threading.Event) -> None:
    """Follow the runs that are named in a file, each in the order in which it began."""
    seen = 0
    while True:
        last = over.is_set()  # asked before the last look
        folders = ran.read_text().splitlines()
        for line in folders[seen:]:
            folder = directory.RunDir(line)
            print(f"run {folder.id}", file=sys.stderr)
            for lines in logs.follow_lines(folder, logs.Search(), colours=True):
                print(*map(clean, lines), sep="\n", file=sys.stderr, flush=True)
        seen = len(folders)
        if last:
            return
        over.wait(state.LOOK)


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


def _kernel_name(notebook: Path) -> str:
    """The kernel that the notebook names, if this machine has it; else this environment's."""
    from jupyter_client.kernelspec import KernelSpecManager

    from tpunb.notebook.files import load_cells

    load_cells(notebook)  # says what is wrong, where papermill would show a traceback
    metadata = json.loads(notebook.read_text(encoding="utf-8-sig")).get("metadata", {})
    name = metadata.get("kernelspec", {}).get("name", "")
    return name if name in KernelSpecManager().find_kernel_specs() else "python3"


def _make_folder(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TpunbError(f"cannot write {output}: {error.strerror}") from error


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
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


def _describe(result: RunResult) -> str:
    """One line: what ran, on what, how it ended, and its last metrics (reduced over ranks)."""
    ended = f"{result.state} on {result.cores()} in {result.duration:.1f} s{result.lacks()}"
    last: dict[str, float] = {}
    for row in metrics.reduce_rows(metrics.read_rows(result.dir / "metrics.jsonl"), whole=True):
        last |= metrics.values_of(row)
    return " · ".join(
        [f"{result.name}: {ended}", *(f"{name} {value:.4g}" for name, value in last.items())]
    )
