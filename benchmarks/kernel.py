"""A real ipykernel with a notebook file open, driven as JupyterLab drives one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tpunb.worker import processes
from tpunb.worker.processes import Process

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


@dataclass
class Running:
    """A cell that was sent, and what is known of it by now."""

    message: str
    """The id of the request."""
    sent: float
    awaited: set[str]
    """Words that no text has held yet."""
    found: float | None = None
    """When the last of the awaited words was here."""
    texts: list[str] = field(default_factory=list)
    displays: dict[str, str] = field(default_factory=dict)
    """What outputs that are replaced show as text, by display id."""
    error: str | None = None
    """The traceback, if it has failed."""
    raised: float | None = None
    """When that was here."""
    ended: float | None = None

    def take(self, kind: str, content: dict[str, Any]) -> None:
        """Take in one message about this cell."""
        if kind == "stream":
            self.texts.append(content["text"])
            self._look(content["text"])
        elif kind in ("display_data", "update_display_data"):
            text = content["data"]["text/plain"]
            self.displays[content.get("transient", {}).get("display_id", "")] = text
            self._look(text)
        elif kind == "error":
            self.error, self.raised = "\n".join(content["traceback"]), time.monotonic()
        elif kind == "status" and content["execution_state"] == "idle":
            self.ended = time.monotonic()

    def _look(self, text: str) -> None:
        if self.awaited:
            self.awaited -= {words for words in self.awaited if words in text}
            self.found = None if self.awaited else time.monotonic()

    def text(self) -> str:
        """What the cell has printed, and what it shows beside."""
        return "\n".join(["".join(self.texts), *self.displays.values()])


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
        if kind is None and self.is_there:
            # Waits until the processes of tpunb have ended.
            self.do("get_ipython().run_line_magic('unload_ext', 'tpunb')")
        if self.is_there:
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

    def send(self, index: int, *, await_words: Sequence[str] = ()) -> Running:
        """Send the code cell with this index, and go on: `read` takes in what it says."""
        cell = self._cells[index]
        return self._send(cell.source, {"cellId": cell.id}, await_words)

    def read(self, running: Running, timeout: float) -> bool:
        """Take in one message, if one comes in time; whether one came."""
        try:
            heard = self._client.get_iopub_msg(timeout=timeout)
        except Empty:
            return False
        if heard["parent_header"].get("msg_id") == running.message:
            running.take(heard["msg_type"], heard["content"])
            if running.ended is not None:
                self._client.get_shell_msg(timeout=PATIENCE)
        return True

    def interrupt(self) -> None:
        """The stop button."""
        self._manager.interrupt_kernel()

    def processes(self) -> list[Process]:
        """All living processes below the kernel."""
        return processes.descendants(self._manager.provisioner.pid)  # type: ignore[union-attr]

    @property
    def is_there(self) -> bool:
        """Whether it was not killed."""
        return self._manager.has_kernel

    def kill(self) -> None:
        """End a kernel that does not answer."""
        self._manager.shutdown_kernel(now=True)

    def _send(self, source: str, metadata: dict[str, Any] | None, words: Sequence[str]) -> Running:
        request = {
            "code": source,
            "silent": False,
            "store_history": metadata is not None,
            "user_expressions": {},
            "allow_stdin": True,  # as a person's front end says; nobody is asked here
            "stop_on_error": True,
        }
        message = self._client.session.msg("execute_request", request, metadata=metadata)
        running = Running(message["header"]["msg_id"], time.monotonic(), set(words))
        self._client.shell_channel.send(message)
        return running

    def _execute(self, source: str, metadata: dict[str, Any] | None, words: str) -> Execution:
        running = self._send(source, metadata, [words] if words else [])
        while running.ended is None:
            if not self.read(running, PATIENCE):
                raise CellError(f"silent for {PATIENCE:.0f} s:\n{source}\n{running.text()}")
        text = running.text()
        if running.error is not None:
            raise CellError(f"{running.error}\n{text}")
        if running.awaited:
            raise CellError(f"{words!r} was not printed:\n{text}")
        return Execution(running.sent, running.found, running.ended, text)
