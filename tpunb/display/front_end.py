"""The front end of the running cell: its abilities, and how to write its outputs."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display, update_display

from tpunb.display import output_budget
from tpunb.utils import terminal

NOTHING = {"text/html": "", "text/plain": ""}
"""An output that takes no room, and keeps the place of a later one."""


@dataclass(frozen=True)
class FrontEnd:
    """The outputs of a cell: text that is appended, and outputs that are replaced in place."""

    write: Callable[[str], None]
    publish: Callable[[dict[str, str]], None] | None
    """Shows a bundle of MIME types; None in a terminal, which cannot replace an output."""
    batch: bool = False
    """True under papermill and nbclient: every message becomes an output in the file."""
    stops: bool = False
    """True if a button in the card can interrupt the cell (JupyterLab and Notebook 7)."""
    newest: Callable[[str, Sequence[str]], None] | None = None
    """Replaces the newest lines and the line above them, once `room` is used up."""
    figure: Callable[[int, bytes, str], None] | None = None
    """Shows the figure with this number, a PNG with its description, or replaces it."""
    room: int | None = None
    """Bytes that may be written before only the newest lines are shown; None: no limit."""

    @property
    def links(self) -> bool:
        """True if links to cell ids work: in JupyterLab, Notebook 7, and nbconvert's HTML."""
        return self.stops or self.batch


def current_front_end() -> FrontEnd:
    # get_ipython has no types in the older versions that Colab uses.
    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return FrontEnd(write_text, None)
    # Only nbclient, and papermill with it, cannot ask for input.
    request = kernel.get_parent()
    batch = not request.get("content", {}).get("allow_stdin", True)
    # Only JupyterLab and Notebook 7 send the cell's id.
    stops = not batch and "cellId" in request.get("metadata", {})
    return FrontEnd(
        write_text,
        ReplacedOutput(),
        batch=batch,
        stops=stops,
        newest=_Newest(),
        figure=_Figures(),
        room=output_budget.ROOM,
    )


def show_bundle(bundle: dict[str, str]) -> Callable[[dict[str, str]], None] | None:
    """Show a bundle of MIME types, text/plain among them, in the running cell.

    Returns a function that replaces it, from any thread; None in a terminal.
    """
    front = current_front_end()
    if front.publish is not None:
        front.publish(bundle)
    else:
        front.write(terminal.coloured(bundle["text/plain"]) + "\n")
    return front.publish


def write_text(text: str) -> None:
    """Write to the cell's output at once: in a kernel, one message."""
    sys.stdout.write(text)
    sys.stdout.flush()


class _Newest:
    """The newest lines, as one output below the written lines; keeps colours."""

    def __init__(self) -> None:
        self._output = ReplacedOutput()

    def __call__(self, head: str, lines: Sequence[str]) -> None:
        self._output({"text/plain": "\n".join([head, *lines])})


class _Figures:
    """The figures of a run, each an output of its own."""

    def __init__(self) -> None:
        self._outputs: dict[int, ReplacedOutput] = {}

    def __call__(self, number: int, png: bytes, text: str) -> None:
        output = self._outputs.setdefault(number, ReplacedOutput())
        output({"image/png": base64.b64encode(png).decode(), "text/plain": text})


class ReplacedOutput:
    """One output of the cell, replaced by each new bundle; a saved notebook keeps the last one."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def __call__(self, bundle: dict[str, str]) -> None:
        """Show a bundle of MIME types."""
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class SharedOutput:
    """An output that several cells show; each new bundle replaces it in all of them.

    Text that a background thread prints would appear below the cell that is running by chance. An
    output with a display id is replaced in its place, in every front end.
    """

    def __init__(self, name: str) -> None:
        self._id = f"tpunb-{name}"
        self._bundle: dict[str, Any] = {}
        self._cell: int | None = None
        """Execution count of the last cell that showed it."""

    def __call__(self, bundle: dict[str, Any]) -> None:
        """Replace the output, from any thread."""
        self._bundle = bundle
        if self._cell is not None:
            update_display(bundle, raw=True, display_id=self._id)

    def show(self) -> None:
        """Show the output in the running cell, once per cell; call it in the cell's thread."""
        shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
        if self._bundle and shell.execution_count != self._cell:
            self._cell = shell.execution_count
            display(self._bundle, raw=True, display_id=self._id)
