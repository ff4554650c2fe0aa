"""VS Code, which starts kernels without a Jupyter server.

Read in microsoft/vscode-jupyter 3d24702: start-up code sets `__vsc_ipynb_file__` in the kernel
(src/kernels/kernel.ts), except when VS Code connects to a kernel that is already running, and does
not set it again when the file is renamed. The id sent with an execution is the address of the
cell (src/kernels/execution/cellExecution.ts), which begins with the notebook's current path.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tpunb.notebook.capture.sources.base import Kernel, LocatedNotebook

SCHEME = "vscode-notebook-cell"


def from_vscode(kernel: Kernel) -> LocatedNotebook | None:
    """The path in the newest cell's address, otherwise the path set at the kernel's start."""
    ids = (run.id for run in reversed(kernel.executed) if run.id)
    address = next((id for id in ids if id.startswith(f"{SCHEME}:")), "")
    for name in (unquote(urlsplit(address).path), kernel.user_ns.get("__vsc_ipynb_file__")):
        # A notebook that was never saved has the relative path Untitled-1.ipynb.
        path = Path(name) if isinstance(name, str) else Path()
        if path.is_absolute() and path.is_file():
            return LocatedNotebook("VS Code", path)
    return None
