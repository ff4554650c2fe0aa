"""Real kernels, started and talked to as notebooks do it."""

from __future__ import annotations

import os
import queue
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbformat import v4

from tpunb.worker import processes
from tpunb.worker.processes import Process

ROOT = Path(__file__).parents[1]
PATIENCE = 240.0
"""Seconds that anything may take on a machine that is busy with other things."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def until(true: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Wait until something is true; its value. Fails, saying what was waited for."""
    deadline = time.monotonic() + patience
    while not (value := true()):
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain: {what}"
        time.sleep(0.02)
    return value


@dataclass
class Ran:
    """A cell that was sent, and what it has shown until now."""

    source: str
    message: str
    """The id of the request."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    """What was written: stream and text, in order of arrival."""
    displays: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Bundles in order, by display id; each with its newest update."""
    updates: int = 0
    value: dict[str, Any] | None = None
    """The bundle of the cell's value."""
    error: dict[str, Any] | None = None
    number: int | None = None
    idle: bool = False
    reply: dict[str, Any] | None = None
    sent: float = 0.0
    done: float = 0.0

    @property
    def seconds(self) -> float:
        """From the request to the reply."""
        return self.done - self.sent

    @property
    def stdout(self) -> str:
        return "".join(text for stream, text in self.texts if stream == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(text for stream, text in self.texts if stream == "stderr")

    @property
    def shown(self) -> str:
        """The text of the value, without quotes where it is a string's repr."""
        return "" if self.value is None else str(self.value["text/plain"])

    @property
    def status(self) -> str:
        """The status line: the only thing that is displayed by a run."""
        [status] = self.statuses()
        return status

    def statuses(self) -> list[str]:
        """One for each run that the cell made."""
        return [str(bundle["text/plain"]) for bundle in self.displays.values()]

    @property
    def traceback(self) -> str:
        """The error as a person reads it, without colours."""
        assert self.error is not None, f"the cell did not fail:\n{self.screen()}"
        return _COLOUR.sub("", "\n".join(self.error["traceback"]))

    def screen(self) -> str:
        """All that a person sees below the cell at last."""
        parts = [str(bundle["text/plain"]) for bundle in self.displays.values()]
        parts += [f"{text}" for _, text in self.texts]
        if self.value is not None:
            parts.append(f"Out[{self.number}]: {self.shown}")
        if self.error is not None:
            parts.append(self.traceback)
        return "\n".join(parts)

    def good(self) -> Ran:
        """This cell, which did not fail."""
        assert self.reply is not None
        assert self.reply["status"] == "ok", self.screen()
        return self


class Kernel:
    """A kernel, and the notebook in front of it.

    Cells are sent with ids, as JupyterLab does, and are in the saved file in the order in which
    they were first run; without a file they are sent without ids, as nbclient does.
    """

    def __init__(self, folder: Path, *, file: str | None, env: dict[str, str]) -> None:
        self.folder = folder
        self.path = None if file is None else folder / file
        self.cells: dict[str, str] = {}
        self._env = {name: value for name, value in os.environ.items() if name[:4] != "JPY_"}
        # Importing torch_xla has set it, where a test of this process did.
        self._env.pop("PJRT_DEVICE", None)
        self._env |= {"PYTHONPATH": str(ROOT), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        self._env |= {"IPYTHONDIR": str(folder / ".ipython"), "JPY_PARENT_PID": "1"} | env
        if self.path is not None:
            self._env["JPY_SESSION_NAME"] = str(self.path)
            self.save()
        self.manager, self.client = start_kernel(KernelManager, cwd=str(folder), env=self._env)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def save(self) -> None:
        """Write the notebook's file."""
        if self.path is not None:
            cells = [v4.new_code_cell(source, id=name) for name, source in self.cells.items()]
            nbformat.write(v4.new_notebook(cells=cells), self.path)

    def send(self, source: str, id: str | None = None, *, saved: bool = True) -> Ran:
        """Send a cell, and go on. `saved`: the file is written before, as a person would."""
        metadata: dict[str, Any] = {}
        if self.path is not None:
            id = id or f"cell-{len(self.cells)}"
            self.cells[id] = source
            metadata = {"trusted": True, "deletedCells": [], "recordTiming": False, "cellId": id}
            if saved:
                self.save()
        content = {
            "code": source,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": self.path is not None,
            "stop_on_error": True,
        }
        message = self.client.session.msg("execute_request", content, metadata=metadata)
        ran = Ran(source, message["header"]["msg_id"], sent=time.monotonic())
        self.client.shell_channel.send(message)
        return ran

    def read(self, ran: Ran, timeout: float = 0.5) -> None:
        """Take in one message about a cell, if one comes in time."""
        try:
            message = self.client.get_iopub_msg(timeout=timeout)
        except queue.Empty:
            return
        if message["parent_header"].get("msg_id") == ran.message:
            _take(ran, message["msg_type"], message["content"])

    def until(self, ran: Ran, what: str, *, times: int = 1) -> None:
        """Read until a text was written so often."""
        deadline = time.monotonic() + PATIENCE
        while "".join(text for _, text in ran.texts).count(what) < times:
            assert time.monotonic() < deadline, f"waited for {what!r}:\n{ran.screen()}"
            assert not ran.idle, f"ended without {what!r}:\n{ran.screen()}"
            self.read(ran)

    def wait(self, ran: Ran) -> Ran:
        """Read until the cell has ended."""
        deadline = time.monotonic() + PATIENCE
        while not ran.idle:
            assert time.monotonic() < deadline, f"did not end:\n{ran.screen()}"
            self.read(ran)
        reply = self.client._recv_reply(ran.message, timeout=PATIENCE)
        ran.reply, ran.done = reply["content"], time.monotonic()
        ran.number = ran.reply["execution_count"]
        return ran

    def run(self, source: str, id: str | None = None, *, saved: bool = True) -> Ran:
        """Send a cell and wait for its end."""
        return self.wait(self.send(source, id, saved=saved))

    def value(self, expression: str) -> Any:
        """The value of an expression in the kernel, of those that are literals."""
        import ast

        message = self.client.execute(
            "", silent=True, user_expressions={"it": f"repr(({expression}))"}, reply=True,
            timeout=PATIENCE,
        )  # fmt: skip
        found = message["content"]["user_expressions"]["it"]
        assert found["status"] == "ok", found
        return ast.literal_eval(ast.literal_eval(found["data"]["text/plain"]))

    def interrupt(self) -> None:
        """The stop button."""
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """The restart button; the cells that ran are forgotten, as by the person."""
        self.manager.restart_kernel(now=False)
        self.client.wait_for_ready(timeout=PATIENCE)

    def processes(self) -> list[Process]:
        """Guard, agent and everything below."""
        return processes.descendants(self.pid)

    def working(self) -> list[Process]:
        """The processes of a run that goes on: all below a guard but its agent, the oldest."""
        guards = [p for p in self.processes() if "guard.main" in _command(p.pid)]
        return [p for guard in guards for p in processes.descendants(guard.pid)[1:]]

    def stop(self) -> None:
        """Shut the kernel down, and wait until it has."""
        stop_kernel(self.manager, self.client)


def start_kernel(
    make: Callable[[], KernelManager], **options: Any
) -> tuple[KernelManager, BlockingKernelClient]:
    """A kernel that answers, and a client of it. `options`: what `start_kernel` takes.

    Its ports are chosen before its process begins, so that one may be taken by then, and the
    kernel ends: that happens when others start at the same time, and is tried once more.
    """
    for again in (True, False):
        manager = make()
        manager.start_kernel(**options)
        client: BlockingKernelClient = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=PATIENCE)
        except RuntimeError:
            again = again and not manager.is_alive()
            stop_kernel(manager, client)
            if not again:
                raise
        else:
            break
    return manager, client


def stop_kernel(manager: KernelManager, client: BlockingKernelClient, *, now: bool = False) -> None:
    """End a kernel, and wait until it has."""
    client.stop_channels()
    if manager.has_kernel:
        manager.shutdown_kernel(now=now)
    manager.cleanup_resources()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _take(ran: Ran, kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        ran.texts.append((content["name"], content["text"]))
    elif kind in ("display_data", "update_display_data"):
        name = content.get("transient", {}).get("display_id", f"unnamed {len(ran.displays)}")
        ran.updates += kind == "update_display_data"
        ran.displays[name] = content["data"]
    elif kind == "execute_result":
        ran.value = content["data"]
    elif kind == "error":
        ran.error = content
    elif kind == "status" and content["execution_state"] == "idle":
        ran.idle = True


@contextmanager
def kernel(folder: Path, file: str | None = "digits.ipynb", **env: str) -> Iterator[Kernel]:
    """A kernel in a folder, with a notebook of this name, or none; it is shut down at the end."""
    made = Kernel(folder, file=file, env=env)
    try:
        yield made
    finally:
        made.stop()
