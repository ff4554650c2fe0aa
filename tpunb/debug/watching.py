"""Puts the watchers around a cell, and makes their report."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.debug import xla
from tpunb.debug.places import Places
from tpunb.debug.report import Report


class StepsDone(BaseException):
    """`--steps N`: the steps that were asked for are done."""


@contextlib.contextmanager
def watching(
    shell: InteractiveShell, *, steps: int | None = None, nan: bool = False
) -> Iterator[Callable[[], Report | None]]:
    """A block that is watched; gives what makes the report of it, to be called after it.

    Watching begins when torch_xla is there, which the block itself may import.
    """
    from tpunb.worker.replacing import Replacements

    places = Places(shell)
    stack = contextlib.ExitStack()
    made: list[Callable[[], Report | None]] = []

    def begin(torch_xla: ModuleType) -> None:
        if made:
            return
        # Imported here: these need torch, which is there now.
        from tpunb.debug.findings import Findings
        from tpunb.debug.finite import Finite
        from tpunb.debug.gradients import Gradients
        from tpunb.debug.recorder import Recorder

        recorder = Recorder(places.files, steps)
        gradients = Gradients(recorder, places.files, shell.user_ns)
        finite = Finite(recorder, gradients) if nan else None
        made.append(Findings(recorder, gradients, places, finite).report)
        xlac: Any = torch_xla._XLAC
        names.set(xlac, xla.STEP_MARKER, recorder.mark(getattr(xlac, xla.STEP_MARKER)))
        xla_model = importlib.import_module("torch_xla.core.xla_model")
        for name in xla.REDUCING:
            names.set(xla_model, name, gradients.reducing(getattr(xla_model, name)))
        stack.enter_context(recorder)
        stack.enter_context(gradients.watching())
        if finite is not None:
            stack.enter_context(finite.watching())

    names = Replacements({"torch_xla": begin})
    names.begin()
    stack.callback(names.end)
    with stack:
        yield lambda: made[0]() if made else None
