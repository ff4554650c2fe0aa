"""A real Jupyter server with an open notebook, used as a browser does: over a websocket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

import nbformat
import websocket

from tpunb.utils import processes
from tpunb.utils.processes import Process

PATIENCE = 300.0
LOGGED_IN = {"Authorization": "token bench"}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Heard:
    """Messages received for one cell."""

    message: str
    """The id of the request."""
    streams: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, name and text of each stream output."""
    updates: list[tuple[float, float, dict[str, Any]]] = field(default_factory=list)
    """For each output shown or replaced: the time, the processor seconds that the kernel's process
    had used by then, and the MIME bundle."""
    error: str = ""
    """The traceback, if the cell failed."""
    ended: float | None = None

    def take(self, kind: str, content: dict[str, Any], kernel: Process) -> None:
        """Add one message about this cell."""
        now = time.monotonic()
        if kind == "stream":
            self.streams.append((now, content["name"], content["text"]))
        elif kind in ("display_data", "update_display_data"):
            self.updates.append((now, _used(kernel), content["data"]))
        elif kind == "error":
            self.error = "\n".join(content["traceback"])
        elif kind == "status" and content["execution_state"] == "idle":
            self.ended = now

    @property
    def dropped(self) -> list[str]:
        """Warnings of the server that it has dropped messages."""
        return [text for _, _, text in self.streams if "rate exceeded" in text]


class Server:
    """Context manager for a server, one session with its kernel, and the kernel's websocket."""

    def __init__(self, notebook: Path) -> None:
        self._notebook = notebook
        self._folder = notebook.parent
        self._cells = [
            cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"
        ]

    def __enter__(self) -> Server:
        runtime = self._folder / "runtime"
        options = "--no-browser --allow-root --ServerApp.port=0 --IdentityProvider.token=bench"
        env = {**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime)}
        with open(self._folder / "server.log", "w") as log:
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyter_server",
                    *options.split(),
                    f"--ServerApp.root_dir={self._folder}",
                ],
                cwd=self._folder,
                env=env,
                stdout=log,
                stderr=log,
            )
        self._url = self._wait_for_url(runtime)
        session = self._ask(
            "api/sessions",
            {
                "path": self._notebook.name,
                "name": "",
                "type": "notebook",
                "kernel": {"name": "python3"},
            },
        )
        kernel = session["kernel"]["id"]
        self._socket = websocket.create_connection(
            f"{self._url.replace('http', 'ws', 1)}api/kernels/{kernel}/channels",
            timeout=PATIENCE,
            header=LOGGED_IN,
        )
        [self._kernel] = [
            process
            for process in processes.descendants(self._server.pid)
            if "ipykernel" in Path(f"/proc/{process.pid}/cmdline").read_text()
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._server.terminate()
        self._server.wait(PATIENCE)

    def _wait_for_url(self, runtime: Path) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for path in runtime.glob("jpserver-*.json"):
                try:
                    url = str(json.loads(path.read_text())["url"])
                    urlopen(Request(f"{url}api", headers=LOGGED_IN)).close()
                except (
                    ValueError,
                    OSError,
                ):  # the file is being written, or the server does not listen yet
                    continue
                return url
            time.sleep(0.05)
        raise TimeoutError((self._folder / "server.log").read_text())

    def _ask(self, path: str, data: dict[str, Any]) -> Any:
        request = Request(
            f"{self._url}{path}",
            json.dumps(data).encode(),
            {"Content-Type": "application/json", **LOGGED_IN},
        )
        with urlopen(request) as answer:
            return json.load(answer)

    def run(self, index: int) -> Heard:
        """Run the code cell with this index, and return all its messages."""
        cell = self._cells[index]
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": "execute_request",
            "version": "5.3",
            "username": "",
            "session": uuid.uuid4().hex,
            "date": "",
        }
        content = {
            "code": cell.source,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": True,
            "stop_on_error": True,
        }
        message = {
            "header": header,
            "parent_header": {},
            "metadata": {"cellId": cell.id},
            "content": content,
            "channel": "shell",
            "buffers": [],
        }
        self._socket.send(json.dumps(message))
        heard = Heard(header["msg_id"])
        while heard.ended is None:
            received = json.loads(self._socket.recv())
            if received["parent_header"].get("msg_id") == heard.message:
                heard.take(received["msg_type"], received["content"], self._kernel)
        if heard.error:
            raise AssertionError(heard.error)
        return heard


def _used(process: Process) -> float:
    """Processor seconds of a process so far."""
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / _TICKS
