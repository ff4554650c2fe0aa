"""How widgets are heard while a cell runs: the one place that knows names of ipykernel's own.

A running cell has the kernel's main thread, and on ipykernel 6 what a person clicks waits for its
end. From version 7 on JupyterLab and Notebook 7 send it to a subshell, another thread (seen with
7.0, 7.3 and 7.4).
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any


def are_heard() -> bool:
    """Whether what is clicked while a cell runs reaches the kernel at once."""
    return int(version("ipykernel").partition(".")[0]) >= 7


def let_through(widget: Any) -> None:
    """Have what is said to a widget come by the subshell, whoever spoke on its comm last.

    ipykernel 7.4 leads it to the thread that did (`BaseComm._reply_subshell_for`), which for a
    widget that a cell has made is the main one, and busy. Versions before have no such name.
    """
    comm = widget.comm
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default
