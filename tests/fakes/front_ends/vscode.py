"""A stand-in for VS Code: it starts a kernel and sends cells as VS Code does.

For tests: start-up code and metadata are those of microsoft/vscode-jupyter 3d24702
(src/kernels/kernel.ts, src/kernels/execution/cellExecution.ts).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote


class Window:
    """A notebook that is open in VS Code, and a client of its kernel."""

    def __init__(self, client: Any, notebook: Path) -> None:
        self.client = client
        self.notebook = notebook
        """Its present path: renaming the file in VS Code changes it."""

    def start(self) -> None:
        """What VS Code runs in every kernel that it starts."""
        name = str(self.notebook).replace("\\", "\\\\")
        self._send(f'__vsc_ipynb_file__ = "{name}"', {}, silent=True)

    def execute(self, source: str, cell: int) -> dict[str, Any]:
        """Run a cell, known by a number of VS Code's own; the content of the reply."""
        address = f"vscode-notebook-cell:{quote(str(self.notebook))}#W{cell}sZmlsZQ%3D%3D"
        # Of the cell's metadata that is sent along there is none here.
        return self._send(source, {"cellId": address}, silent=False)

    def _send(self, source: str, metadata: dict[str, Any], *, silent: bool) -> dict[str, Any]:
        content = {"code": source, "silent": silent, "store_history": not silent}
        message = self.client.session.msg(
            "execute_request",
            content | {"user_expressions": {}, "allow_stdin": True, "stop_on_error": False},
            metadata=metadata,
        )
        self.client.shell_channel.send(message)
        reply = self.client._recv_reply(message["header"]["msg_id"], timeout=120)
        found: dict[str, Any] = reply["content"]
        return found
