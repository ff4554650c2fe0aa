"""How widgets are heard while a cell runs: the one place that knows names of ipykernel's own.

A running cell has the kernel's main thread, in which what a person clicks is handled. From
ipykernel 7 on JupyterLab and Notebook 7 send it to a subshell, another thread (seen with 7.0, 7.3
and 7.4). On ipykernel 6 it waits behind the cell and all cells that were run after it, and is
fetched from there (seen with 6.17 and 6.31): what is not for the widgets that ask stays where it
is, so no cell runs early, and none after a failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from IPython.core.getipython import get_ipython

from tpunb.display.frontend import FrontEnd

_VERSION = tuple(map(int, version("ipykernel").split(".")[:2]))
_SUBSHELLS = (7, 0)
_FETCHED = (6, 17)
"""The first version whose queue is known; before `_SUBSHELLS` all have it."""
_OF_A_KERNEL = ("shell_stream", "msg_queue", "dispatch_shell", "_parents", "_publish_status")


def are_heard(front: FrontEnd) -> bool:
    """Whether what is clicked while a cell runs can reach the kernel before its end."""
    if front.publish is None or front.batch:
        return False
    if _VERSION >= _SUBSHELLS:
        return front.stops  # JupyterLab and Notebook 7 are who knows subshells
    kernel = _kernel()
    return _VERSION >= _FETCHED and all(hasattr(kernel, name) for name in _OF_A_KERNEL)


def let_through(widget: Any) -> None:
    """Have what is said to a widget come by the subshell, whoever spoke on its comm last.

    ipykernel 7.4 leads it to the thread that did (`BaseComm._reply_subshell_for`), which for a
    widget that a cell has made is the main one, and busy. Versions before have no such name.
    """
    comm = widget.comm
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


def fetch(widgets: Iterable[Any]) -> None:
    """Let these widgets know now what a person has done, where ipykernel 6 would let it wait.

    To be called in the thread of the cell that runs.
    """
    if _VERSION >= _SUBSHELLS:
        return
    kernel = _kernel()
    by_comm = {widget.comm.comm_id: widget for widget in widgets if widget.comm is not None}
    kernel.shell_stream.flush()
    queue = kernel.msg_queue._queue
    found = [(item, by_comm.get(_addressee(kernel, item))) for item in queue]
    for item, widget in found:
        if widget is not None:
            queue.remove(item)
            _hand_over(kernel, item, widget)


def _kernel() -> Any:
    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    return shell.kernel


def _addressee(kernel: Any, item: Any) -> str | None:
    """The comm that a message which waits is for, if it is for one; it is read, and not taken."""
    _, dispatch, args = item
    if dispatch != kernel.dispatch_shell:
        return None
    try:
        _, (_, header, _, _, content, *_) = kernel.session.feed_identities(args[0], copy=False)
        if kernel.session.unpack(header.bytes)["msg_type"] != "comm_msg":
            return None
        return str(kernel.session.unpack(content.bytes)["comm_id"])
    except (ValueError, KeyError, TypeError):  # no message as it should be: ipykernel tells it
        return None


def _hand_over(kernel: Any, item: Any, widget: Any) -> None:
    """What ipykernel does with a message, but for the hooks that run before and after a cell.

    The front end waits until it is told that the kernel is idle again before it sends the next;
    that it is busy with the cell is said once more, for whoever shows that.
    """
    session = kernel.session
    _, frames = session.feed_identities(item[2][0], copy=False)
    try:
        message = session.deserialize(frames, content=True, copy=False)
    except ValueError:  # not signed with the kernel's key: not from its front end
        return
    of_the_cell = kernel._parents["shell"]
    kernel._parents["shell"] = message  # what the widget answers is an answer to this
    try:
        kernel._publish_status("busy", "shell")
        widget._handle_msg(message)
        kernel._publish_status("idle", "shell")
        kernel._publish_status("busy", "shell")
    finally:
        kernel._parents["shell"] = of_the_cell
