"""`tpunb run`: a whole notebook with papermill, and how its runs ended."""

from __future__ import annotations

import ast
import difflib
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
from tpunb.notebook.convert import statements
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
        with _environment(variables), _watched(Path(ran.name)):
            executed = _execute(notebook, output, parameters, kernel)
        folders = [directory.RunDir(line) for line in ran.read().splitlines()]
    if executed and not folders:
        print(f"tpunb: {notebook}: no cell ran %%tpu_train", file=sys.stderr)
    succeeded = [_report(folder) for folder in folders]
    return 0 if executed and folders and all(succeeded) else 1


def _execute(notebook: Path, output: Path, parameters: Mapping[str, str], kernel: str) -> bool:
    """Run all cells; False if one failed, which was printed."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillException, PapermillExecutionError

    _make_folder(output)
    try:
        papermill.execute_notebook(
            notebook,
            output,
            parameters={name: parameter(text) for name, text in parameters.items()},
            kernel_name=kernel,
            language="python",
            progress_bar=False,
            log_output=False,
            # ipykernel 7.4 warns of its own TCP sockets, which are this machine's. What it calls
            # an error is shown.
            extra_arguments=["--IPKernelApp.log_level=40"],
        )
    except KeyboardInterrupt:
        # nbclient's task ends with the kernel, and nobody asks for its exception.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    except PapermillExecutionError as error:
        where = f"{notebook}, cell [{error.exec_count}]"
        print(f"tpunb: {where}: {_reason(error, output)}", file=sys.stderr)
        return False
    except (PapermillException, DeadKernelError) as error:
        print(f"tpunb: {notebook}: {str(error).strip()}", file=sys.stderr)
        return False
    return True


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


def refuse_unknown(notebook: Path, parameters: Mapping[str, str]) -> None:
    """Raise TpunbError for a parameter that changes nothing: no cell would use its value.

    papermill puts the values below the cell tagged `parameters`, or above all cells. A name that
    another cell reads and none assigns is one, too.
    """
    from tpunb.notebook.files import load_cells
    from tpunb.notebook.lint.walk import parse_cells
    from tpunb.notebook.models import Snapshot

    cells = load_cells(notebook)
    tagged = {cell.index for cell in cells if "parameters" in cell.tags}
    injected = {cell.index for cell in cells if "injected-parameters" in cell.tags}
    parsed = parse_cells(Snapshot(cells, None, str(notebook), "the notebook file"))
    known: set[str] = set()
    assigned: set[str] = set()
    read: set[str] = set()
    for cell in parsed:
        if cell.index in tagged:
            known |= statements.bound_names(cell.tree)
        elif cell.index not in injected:
            assigned |= statements.bound_names(cell.tree)
            read |= set(re.findall(r"[^\W\d]\w*", "\n".join(cell.lines)))
    for name in parameters:
        if name in known or (name in read and name not in assigned):
            continue
        nearest = difflib.get_close_matches(name, sorted(known), 1, 0.6)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        if not tagged:
            hint = ": no cell of it is tagged `parameters`; tag the one that assigns the defaults"
        elif not hint:
            hint = f"; its parameters are: {', '.join(sorted(known)) or 'none'}"
        raise TpunbError(f"-p {name}: {notebook} has no such parameter{hint}")


def _make_folder(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TpunbError(f"cannot write {output}: {error.strerror}") from error


def parameter(text: str) -> Any:
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


def _describe(result: RunResult) -> str:
    """One line: what ran, on what, how it ended, and its last metrics (reduced over ranks)."""
    ended = f"{result.state} on {result.cores()} in {result.duration:.1f} s{result.lacks()}"
    last: dict[str, float] = {}
    for row in metrics.reduce_rows(metrics.read_rows(result.dir / "metrics.jsonl"), whole=True):
        last |= metrics.values_of(row)
    return " · ".join(
        [f"{result.name}: {ended}", *(f"{name} {value:.4g}" for name, value in last.items())]
    )
