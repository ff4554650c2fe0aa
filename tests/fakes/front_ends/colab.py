"""A stand-in for Colab that speaks its protocol: a kernel, and a page that answers it.

`python -m tests.fakes.front_ends.colab -f FILE` is an IPython kernel with a shell of
google.colab's and its `google.colab._message`; `Page` is the browser's side, for a client of
that kernel. For tests: it shows that `Colab` talks to a page as googlecolab/colabtools 3c07d77
does, not what the real page does in every state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.history import HistoryManager


class MessageError(Exception):
    """The page answered with an error."""


class History(HistoryManager):
    """What was executed, and in which cell."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._input_hist_cells: list[dict[str, Any]] = [{"code": "", "cell_id": ""}]

    def store_inputs(self, line_num: int, source: str, source_raw: str | None = None) -> None:
        super().store_inputs(line_num, source, source_raw)
        sent = self.shell.parent_header.get("metadata", {}).get("colab", {})
        self._input_hist_cells.append({"code": source_raw, "cell_id": sent.get("cell_id")})


class Shell(ZMQInteractiveShell):
    """A shell that is known by where its class comes from."""

    __module__ = "google.colab._shell"

    def init_history(self) -> None:
        self.history_manager = History(shell=self, parent=self)


class Kernel(IPythonKernel):
    """A kernel with that shell."""

    shell_class = Shell


def blocking_request(
    request_type: str, request: object = "", timeout_sec: float | None = 5, parent: Any = None
) -> Any:
    """Ask the page and wait for its answer; None if none comes in time.

    Raises MessageError if the page says that it failed.
    """
    from IPython import get_ipython
    from zmq import NOBLOCK

    shell = get_ipython()
    kernel = shell.kernel
    number = time.monotonic_ns()
    # Sent on as part of the cell that is running, or the page would not know it for its own.
    session = (parent or shell.parent_header)["header"]["session"]
    asked = kernel.session.msg(
        "colab_request",
        content={"request": request},
        metadata={"colab_request_type": request_type, "colab_msg_id": number},
        parent={"header": {"session": session}},
    )
    kernel.session.send(kernel.iopub_socket, asked)
    until = time.monotonic() + (timeout_sec or float("inf"))
    while time.monotonic() < until:
        _, message = kernel.session.recv(kernel.stdin_socket, NOBLOCK)
        value = {} if message is None else message["content"]["value"]
        mine = isinstance(value, Mapping) and value.get("colab_msg_id") == number
        if mine and value.get("type") == "colab_reply":
            if "error" in value:
                raise MessageError(value["error"])
            return value.get("data")
        time.sleep(0.025)
    return None


class Page:
    """What answers the kernel's requests, with the notebook as it is in the page."""

    def __init__(self, client: Any, notebook: dict[str, Any]) -> None:
        self.client = client
        self.notebook = notebook
        self.answer: Mapping[str, Any] | None = {}
        """What to send instead of the notebook, if anything; None: nothing, as a closed page."""

    def execute(self, source: str, cell: str) -> dict[str, Any]:
        """Run a cell, answering what the kernel asks; the content of its reply."""
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": True}
        message = self.client.session.msg(
            "execute_request",
            content | {"user_expressions": {}, "stop_on_error": True},
            metadata={"colab": {"cell_id": cell}},
        )
        self.client.shell_channel.send(message)
        while True:
            heard = self.client.get_iopub_msg(timeout=120)
            if heard["msg_type"] == "colab_request":
                self._reply(heard["metadata"])
            ours = heard["parent_header"].get("msg_id") == message["header"]["msg_id"]
            if ours and heard["content"].get("execution_state") == "idle":
                break
        reply = self.client._recv_reply(message["header"]["msg_id"], timeout=120)
        found: dict[str, Any] = reply["content"]
        return found

    def _reply(self, asked: Mapping[str, Any]) -> None:
        if self.answer is None or asked["colab_request_type"] != "get_ipynb":
            return
        reply = {"type": "colab_reply", "colab_msg_id": asked["colab_msg_id"]}
        reply |= self.answer or {"data": {"ipynb": self.notebook}}
        message = self.client.session.msg("input_reply", {"value": reply})
        self.client.stdin_channel.send(message)


def install() -> None:
    """Put `google.colab` where Python looks for modules that are imported already."""
    tree = {name: ModuleType(name) for name in ("google", "google.colab", "google.colab._message")}
    tree["google.colab._message"].__dict__.update(
        blocking_request=blocking_request, MessageError=MessageError
    )
    sys.modules.update(tree)


if __name__ == "__main__":
    install()
    IPKernelApp.launch_instance(kernel_class=Kernel)
