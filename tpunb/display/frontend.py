"""Where the output of a cell goes, and how it takes it best."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display, update_display

from tpunb import terminal
from tpunb.display import paper


@dataclass(frozen=True)
class FrontEnd:
    """Two ways out: text that follows text, and one output that is replaced in place."""

    write: Callable[[str], None]
    publish: Callable[[dict[str, str]], None] | None
    """Takes a bundle of MIME types; None in a terminal, which cannot replace an output."""
    batch: bool = False
    """Nobody watches (papermill, nbclient): every message becomes an output in the file."""
    stops: bool = False
    """A button of JupyterLab's and Notebook 7's own can interrupt the cell."""
    newest: Callable[[str, Sequence[str]], None] | None = None
    """Takes the newest lines, and a line above them, in place of those before …"""
    room: int | None = None
    """… once so many bytes were written; None: all is written."""

    @property
    def links(self) -> bool:
        """A link to a cell's id jumps to it: in JupyterLab, Notebook 7, and nbconvert's HTML."""
        return self.stops or self.batch


def here() -> FrontEnd:
    """The front end of the cell that runs now."""
    # get_ipython has no types in the older versions that Colab runs.
    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return FrontEnd(write, None)
    # nbclient, and papermill with it, are the ones that cannot ask the person for input.
    request = kernel.get_parent()
    batch = not request.get("content", {}).get("allow_stdin", True)
    # JupyterLab and Notebook 7 are the ones that say which cell it is.
    stops = not batch and "cellId" in request.get("metadata", {})
    return FrontEnd(write, Replaced(), batch=batch, stops=stops, newest=_Newest(), room=paper.ROOM)


def show(bundle: dict[str, str]) -> None:
    """Show something once, in the cell that runs now: a bundle with text/plain among its types."""
    front = here()
    if front.publish is not None:
        front.publish(bundle)
    else:
        front.write(terminal.coloured(bundle["text/plain"]) + "\n")


def write(text: str) -> None:
    """Write to the cell's output now: in a kernel, one message."""
    sys.stdout.write(text)
    sys.stdout.flush()


class _Newest:
    """The newest lines as one output below those that were written; colours stay."""

    def __init__(self) -> None:
        self._output = Replaced()

    def __call__(self, head: str, lines: Sequence[str]) -> None:
        self._output({"text/plain": "\n".join([head, *lines])})


class Replaced:
    """An output of the cell that each new bundle replaces. A saved notebook keeps the last."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def __call__(self, bundle: dict[str, str]) -> None:
        """Show a bundle of MIME types."""
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class Shared:
    """An output that stands in several cells; each new bundle replaces it in all of them.

    What a background thread prints lands below whatever cell runs then. An output is replaced by
    its id instead, which every front end puts into its place.
    """

    def __init__(self, name: str) -> None:
        self._id = f"tpunb-{name}"
        self._bundle: dict[str, Any] = {}
        self._cell: int | None = None
        """The number of the cell that it was shown in last."""

    def __call__(self, bundle: dict[str, Any]) -> None:
        """Replace what is shown, from any thread."""
        self._bundle = bundle
        if self._cell is not None:
            update_display(bundle, raw=True, display_id=self._id)

    def show(self) -> None:
        """Display it in the cell that runs now, from its thread, once a cell."""
        shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
        if self._bundle and shell.execution_count != self._cell:
            self._cell = shell.execution_count
            display(self._bundle, raw=True, display_id=self._id)
