"""Real kernels, started and talked to as notebooks do it."""

from __future__ import annotations

import json
import os
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from nbformat import v4

from tests.support import left_below
from tpunb.utils import processes
from tpunb.utils.processes import Process

ROOT = Path(__file__).parents[2]
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
    reply: dict[str, Any] | None = None
    awaited: set[str] = field(default_factory=set)
    """Words that nothing which was shown has held yet."""
    # Times are `time.monotonic`, which all processes share.
    sent: float = 0.0
    found: float | None = None
    """When the last of the awaited words was here."""
    raised: float | None = None
    """When the error was here."""
    idle: float | None = None
    """When the kernel said that it had ended."""
    done: float = 0.0
    """When the reply was here."""

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
        """The status line of the only run of this cell."""
        [status] = self.statuses()
        return status

    def statuses(self) -> list[str]:
        """One for each run that the cell made."""
        return [str(card["text/plain"]) for card in self.cards()]

    def cards(self) -> list[dict[str, Any]]:
        """What is displayed by runs, but for the places of panels, which no front end fills."""
        return [bundle for bundle in self.displays.values() if bundle["text/plain"]]

    @property
    def traceback(self) -> str:
        """The error as a person reads it, without colours."""
        assert self.error is not None, f"the cell did not fail:\n{self.screen()}"
        return _COLOUR.sub("", "\n".join(self.error["traceback"]))

    @property
    def red_line(self) -> str:
        """The error of a run whose card says everything else."""
        assert "\n" not in self.traceback, self.traceback
        return self.traceback

    def printed(self) -> str:
        """What the cell has displayed and written."""
        return "\n".join(["".join(text for _, text in self.texts), *self.statuses()])

    def screen(self) -> str:
        """All that a person sees below the cell at last."""
        parts = [*self.statuses(), *(text for _, text in self.texts)]
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
    they were first run; without a file they are sent without ids, as nbclient does. A file that
    is there already stays, with its cells.
    """

    def __init__(
        self,
        folder: Path,
        *,
        file: str | None,
        env: dict[str, str],
        make: Callable[[], KernelManager] = KernelManager,
        **options: Any,
    ) -> None:
        """`make`: see `of_interpreter`. `options`: what `KernelManager.start_kernel` takes."""
        self.folder = folder
        self.path = None if file is None else folder / file
        self.cells: dict[str, str] = {}
        """The sources, by id."""
        self.deleted: list[str] = []
        """Ids of deleted cells, which the front end sends with the next cell."""
        self._env = {name: value for name, value in os.environ.items() if name[:4] != "JPY_"}
        # Importing torch_xla has set it, where a test of this process did.
        self._env.pop("PJRT_DEVICE", None)
        self._env |= {"PYTHONPATH": str(ROOT), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        self._env.setdefault("IPYTHONDIR", str(folder / ".ipython"))
        self._env |= {"JPY_PARENT_PID": "1"} | env
        if self.path is not None:
            self._env["JPY_SESSION_NAME"] = str(self.path)
            if self.path.exists():
                cells = nbformat.read(self.path, as_version=4).cells
                self.cells = {cell.id: cell.source for cell in cells if cell.cell_type == "code"}
            else:
                self.save()
        self.manager, self.client = start_kernel(make, cwd=str(folder), env=self._env, **options)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def save(self) -> None:
        """Write the notebook's file."""
        if self.path is not None:
            cells = [v4.new_code_cell(source, id=name) for name, source in self.cells.items()]
            nbformat.write(v4.new_notebook(cells=cells), self.path)

    def send(
        self,
        source: str,
        id: str | None = None,
        *,
        saved: bool = True,
        recorded: bool = True,
        await_words: Sequence[str] = (),
    ) -> Ran:
        """Send a cell, and go on.

        `saved`: the file is written before, as a person would. `recorded`: it is in the history;
        what is not is no cell of the notebook (the benchmarks have such cells).
        """
        metadata: dict[str, Any] = {}
        if self.path is not None and recorded:
            id = id or f"cell-{len(self.cells)}"
            self.cells[id] = source
            metadata = {
                "trusted": True,
                "deletedCells": self.deleted,
                "recordTiming": False,
                "cellId": id,
            }
            self.deleted = []
            if saved:
                self.save()
        content = {
            "code": source,
            "silent": False,
            "store_history": recorded,
            "user_expressions": {},
            "allow_stdin": self.path is not None,
            "stop_on_error": True,
        }
        message = self.client.session.msg("execute_request", content, metadata=metadata)
        words, sent = set(await_words), time.monotonic()
        ran = Ran(source, message["header"]["msg_id"], awaited=words, sent=sent)
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
            assert ran.idle is None, f"ended without {what!r}:\n{ran.screen()}"
            self.read(ran)

    def wait(self, ran: Ran, patience: float = PATIENCE) -> Ran:
        """Read until the cell has ended."""
        deadline = time.monotonic() + patience
        while ran.idle is None:
            assert time.monotonic() < deadline, f"did not end:\n{ran.screen()}"
            self.read(ran)
        reply = self.client._recv_reply(ran.message, timeout=PATIENCE)
        ran.reply, ran.done = reply["content"], time.monotonic()
        ran.number = ran.reply["execution_count"]
        if ran.reply["status"] == "error":
            # ipykernel aborts what comes right after an error, as "Run all" wants it.
            until(self._takes_cells, "the kernel takes cells again")
        return ran

    def _takes_cells(self) -> bool:
        message = self.client.execute("", silent=True, reply=True, timeout=PATIENCE)
        return bool(message["content"]["status"] == "ok")

    def run(self, source: str, id: str | None = None, *, saved: bool = True) -> Ran:
        """Send a cell and wait for its end."""
        return self.wait(self.send(source, id, saved=saved))

    def value(self, expression: str) -> Any:
        """The value of an expression in the kernel, of those that are literals."""
        import ast

        message = self.client.execute(
            "",
            silent=True,
            user_expressions={"it": f"repr(({expression}))"},
            reply=True,
            timeout=PATIENCE,
        )
        found = message["content"]["user_expressions"]["it"]
        assert found["status"] == "ok", found
        return ast.literal_eval(ast.literal_eval(found["data"]["text/plain"]))

    def start_over(self, *kept: str) -> None:
        """Delete the cells but those that are kept, and all names that cells have made."""
        self.cells = {id: source for id, source in self.cells.items() if id in kept}
        forget = (
            "_shell = get_ipython()\n"
            "for _name in set(_shell.user_ns) - set(_shell.user_ns_hidden):\n"
            "    if not _name.startswith('_'):\n"
            "        del _shell.user_ns[_name]"
        )
        reply = self.client.execute(forget, silent=True, reply=True, timeout=PATIENCE)
        assert reply["content"]["status"] == "ok", reply

    def interrupt(self) -> None:
        """The stop button."""
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """The restart button; the cells that ran are forgotten, as by the person."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=False)
        # A new client: messages of the old kernel would let the old one take the new kernel's
        # IOPub for connected, and miss the end of its first cell.
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def processes(self) -> list[Process]:
        """Supervisor, fork server and everything below."""
        assert "tpunb-lent-" not in self._env["IPYTHONDIR"], "they are of another process"
        return processes.descendants(self.pid)

    def working(self) -> list[Process]:
        """The processes of a run that goes on: all below a supervisor but its fork server."""
        return [
            process
            for supervisor in self.processes()
            if "tpunb: supervisor" in command(supervisor.pid)
            for process in left_below(supervisor.pid)
        ]

    def stop(self, *, now: bool = False) -> None:
        """Shut the kernel down, and wait until it has."""
        stop_kernel(self.manager, self.client, now=now)


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


def of_interpreter(python: Path, folder: Path) -> Callable[[], KernelManager]:
    """Kernels of another interpreter, as `python -m ipykernel install` offers them."""
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "other", "language": "python"}
    (folder / "other").mkdir(parents=True)
    (folder / "other" / "kernel.json").write_text(json.dumps(spec))
    specs = KernelSpecManager(kernel_dirs=[str(folder)])
    return lambda: KernelManager(kernel_name="other", kernel_spec_manager=specs)


def stop_kernel(manager: KernelManager, client: BlockingKernelClient, *, now: bool = False) -> None:
    """End a kernel, and wait until it has."""
    client.stop_channels()
    if manager.has_kernel:
        manager.shutdown_kernel(now=now)
    manager.cleanup_resources()


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _take(ran: Ran, kind: str, content: dict[str, Any]) -> None:
    shown = ""
    if kind == "stream":
        ran.texts.append((content["name"], content["text"]))
        shown = content["text"]
    elif kind in ("display_data", "update_display_data"):
        name = content.get("transient", {}).get("display_id", f"unnamed {len(ran.displays)}")
        if kind == "update_display_data" and name not in ran.displays:
            return  # of another cell's output, as that of %tpu_setup once torch_xla is preloaded
        ran.updates += kind == "update_display_data"
        ran.displays[name] = content["data"]
        shown = content["data"].get("text/plain", "")
    elif kind == "execute_result":
        ran.value = content["data"]
    elif kind == "error":
        ran.error, ran.raised = content, time.monotonic()
    elif kind == "status" and content["execution_state"] == "idle":
        ran.idle = time.monotonic()
    if shown and ran.awaited:
        ran.awaited -= {words for words in ran.awaited if words in shown}
        if not ran.awaited:
            ran.found = time.monotonic()


@contextmanager
def kernel(folder: Path, file: str | None = "digits.ipynb", **env: str) -> Iterator[Kernel]:
    """A kernel in a folder, with a notebook of this name, or none; it is shut down at the end."""
    made = Kernel(folder, file=file, env=env)
    try:
        yield made
    finally:
        made.stop()
