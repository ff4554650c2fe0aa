"""A real ipykernel with a notebook file open, driven as JupyterLab drives one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

PATIENCE = 300.0
"""Seconds in which a kernel must say something while a cell runs."""
_IS_WARM = (
    "get_ipython().magics_manager.registry['TpuMagics'].session.launcher.is_warm"
    " and not any(t.name == 'tpunb-warm-up' for t in __import__('threading').enumerate())"
)


class CellError(Exception):
    """A cell of a benchmark has failed; the text is its traceback."""


@dataclass(frozen=True)
class Execution:
    """One execution of a cell. Times are `time.monotonic`, which all processes share."""

    sent: float
    first: float | None
    """When the first text that holds the awaited words was here; None if nothing was awaited."""
    ended: float
    text: str
    """What the cell has printed."""


class Kernel:
    """Runs cells of one notebook file; a context manager that ends the kernel and its runs."""

    def __init__(self, notebook: Path) -> None:
        self._cells = [
            cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"
        ]
        self._manager = KernelManager()
        with open(notebook.with_suffix(".log"), "a") as log:
            self._manager.start_kernel(
                cwd=str(notebook.parent),
                env={**os.environ, "JPY_SESSION_NAME": str(notebook)},
                stdout=log,
                stderr=log,
            )
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            # Waits until the processes of tpunb have ended.
            self.do("get_ipython().run_line_magic('unload_ext', 'tpunb')")
        self._manager.shutdown_kernel(now=kind is not None)
        self._client.stop_channels()

    def cell(self, index: int, *, await_words: str = "") -> Execution:
        """Run the code cell with this index (from 0). Raises CellError if it fails."""
        cell = self._cells[index]
        return self._execute(cell.source, {"cellId": cell.id}, await_words)

    def do(self, source: str) -> Execution:
        """Run code that is no cell of the notebook: it leaves no trace in the history."""
        return self._execute(source, None, "")

    def wait_until_warm(self) -> None:
        """Return when the agent has imported everything, and the kernel what converts."""
        deadline = time.monotonic() + PATIENCE
        while self.do(f"print({_IS_WARM})").text.strip() != "True":
            if time.monotonic() > deadline:
                raise TimeoutError("the agent did not get warm")
            time.sleep(0.1)

    def _execute(self, source: str, metadata: dict[str, Any] | None, words: str) -> Execution:
        request = {
            "code": source,
            "silent": False,
            "store_history": metadata is not None,
            "user_expressions": {},
            "allow_stdin": True,  # as a person's front end says; nobody is asked here
            "stop_on_error": True,
        }
        message = self._client.session.msg("execute_request", request, metadata=metadata)
        sent = time.monotonic()
        self._client.shell_channel.send(message)
        first, text = None, ""
        while True:
            try:
                heard = self._client.get_iopub_msg(timeout=PATIENCE)
            except Empty:
                raise CellError(f"silent for {PATIENCE:.0f} s:\n{source}\n{text}") from None
            if heard["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                continue
            kind, content = heard["msg_type"], heard["content"]
            if kind == "stream":
                text += content["text"]
                if words and first is None and words in content["text"]:
                    first = time.monotonic()
            elif kind == "error":
                raise CellError("\n".join([*content["traceback"], text]))
            elif kind == "status" and content["execution_state"] == "idle":
                break
        ended = time.monotonic()
        self._client.get_shell_msg(timeout=PATIENCE)
        if words and first is None:
            raise CellError(f"{words!r} was not printed:\n{text}")
        return Execution(sent, first, ended, text)
