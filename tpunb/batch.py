"""A whole notebook with papermill, and how its runs ended: `tpunb run`."""

from __future__ import annotations

import argparse
import ast
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

from tpunb import control, logs, records, rundir
from tpunb.errors import TpunbError

if TYPE_CHECKING:
    from papermill.exceptions import PapermillExecutionError

    from tpunb.models import RunResult


def run(chosen: argparse.Namespace) -> int:
    """Papermill with a look at the runs that the notebook made: 0 only if all succeeded.

    `chosen`: notebook, output, parameter (pairs of name and text) and cores.
    """
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
        with _environment(variables), _watched(Path(ran.name)):
            try:
                _make_folder(output)
                papermill.execute_notebook(
                    chosen.notebook,
                    output,
                    parameters={name: _value(text) for name, text in chosen.parameter},
                    kernel_name=kernel,
                    language="python",
                    progress_bar=False,
                    log_output=False,
                    # ipykernel 7.4 warns of its own TCP sockets, which are this machine's. What
                    # it calls an error is shown.
                    extra_arguments=["--IPKernelApp.log_level=40"],
                )
            except KeyboardInterrupt:
                # nbclient's task ends with the kernel, and nobody asks for its exception.
                logging.getLogger("asyncio").setLevel(logging.CRITICAL)
                raise
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


@contextmanager
def _watched(ran: Path) -> Iterator[None]:
    """At a terminal the lines of each run as they come; elsewhere the notebook has them."""
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
            folder = rundir.RunDir(line)
            print(f"run {folder.id}", file=sys.stderr)
            for lines in logs.follow(folder, logs.Search(), colours=True):
                print(*lines, sep="\n", file=sys.stderr, flush=True)
        seen = len(folders)
        if last:
            return
        over.wait(control.LOOK)


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


def _make_folder(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TpunbError(f"cannot write {output}: {error.strerror}") from error


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
    """One line: what ran, on what, how it ended, and its last metrics (reduced over ranks)."""
    line = f"{result.name}: {result.state} on {result.cores()} in {result.duration:.1f} s"
    last: dict[str, float] = {}
    for row in records.of_all_ranks(records.read(result.dir / "metrics.jsonl")):
        last |= records.metrics_of(row)
    return " · ".join([line, *(f"{name} {value:.4g}" for name, value in last.items())])
