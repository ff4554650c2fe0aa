"""A real ipykernel with an open notebook file, whose cells are run by index."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tests.drivers.kernel import Kernel as Driver
from tests.drivers.kernel import Ran

PATIENCE = 3600.0
"""Seconds allowed for a cell."""
_IS_WARM = (
    "get_ipython().magics_manager.registry['TpuMagics'].session.runs.launcher.is_warm"
    " and not any(t.name == 'tpunb-warm-up' for t in __import__('threading').enumerate())"
)

UNLOAD = """
import sys
if "tpunb" in sys.modules:
    get_ipython().run_line_magic("unload_ext", "tpunb")
"""


class CellError(Exception):
    """A cell of a benchmark failed; the text is its traceback."""


class Kernel(Driver):
    """Runs cells of one notebook file; a context manager that ends the kernel and its runs."""

    def __init__(self, notebook: Path) -> None:
        with open(notebook.with_suffix(".log"), "a") as log:
            super().__init__(notebook.parent, file=notebook.name, env={}, stdout=log, stderr=log)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self.is_there:
            # Waits until the processes of tpunb have ended.
            self.do(UNLOAD)
        self.stop(now=kind is not None)

    def cell(self, index: int, *, await_words: Sequence[str] = ()) -> Ran:
        """Run the code cell with this index (from 0). Raises CellError if it fails."""
        ran = _checked(self.wait(self.start(index, await_words=await_words), PATIENCE))
        if ran.awaited:
            raise CellError(f"{ran.awaited} was not printed:\n{ran.printed()}")
        return ran

    def start(self, index: int, *, await_words: Sequence[str] = ()) -> Ran:
        """Send the code cell with this index without waiting; `read` receives its output."""
        id = list(self.cells)[index]
        return self.send(self.cells[id], id, saved=False, await_words=await_words)

    def do(self, source: str) -> Ran:
        """Run code that is not a cell of the notebook and is not recorded in the history."""
        return _checked(self.wait(self.send(source, recorded=False), PATIENCE))

    def wait_until_warm(self) -> None:
        """Wait until torch_xla is preloaded, and the converter imported in the kernel."""
        deadline = time.monotonic() + PATIENCE
        while self.do(f"print({_IS_WARM})").stdout.strip() != "True":
            if time.monotonic() > deadline:
                raise TimeoutError("torch_xla was not preloaded")
            time.sleep(0.1)

    @property
    def is_there(self) -> bool:
        """True until the kernel is killed."""
        return self.manager.has_kernel

    def kill(self) -> None:
        """Kill a kernel that does not answer."""
        self.manager.shutdown_kernel(now=True)


def _checked(ran: Ran) -> Ran:
    if ran.error is not None:
        raise CellError(f"{ran.traceback}\n{ran.printed()}")
    return ran
