"""What the prelude has done to a process that must not be done before ranks are forked.

Measured with torch 2.9 and torch_xla 2.9: after a backward pass in the parent, backward on an
XLA tensor fails in a child with an internal assertion; an initialised XLA runtime does not
survive a fork; of several threads only the forking one goes on in the child, and the locks
that others held stay locked.
"""

from __future__ import annotations

import os
from typing import Any

from torch.autograd import Variable


class _Recorder:
    """Stands in for torch's autograd engine and remembers whether it was used."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.used = False

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        self.used = True
        return self.engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Findings:
    """Watches a process from before the prelude; `look` says what forbids a fork now.

    Private names, checked on torch 2.8 and 2.9 and torch_xla 2.8 and 2.9:
    `torch.autograd.Variable._execution_engine` (every backward pass goes through its
    `run_backward`), `torch_xla._XLAC._xla_runtime_is_initialized`.
    """

    def __init__(self) -> None:
        self._recorder = _Recorder(Variable._execution_engine)
        Variable._execution_engine = self._recorder  # type: ignore[assignment]
        self._threads = set(os.listdir("/proc/self/task"))

    def close(self) -> None:
        """Give torch its engine back."""
        Variable._execution_engine = self._recorder.engine

    def look(self) -> str | None:
        """What was found first, as the rest of a sentence that begins with the cell; or None."""
        from torch_xla import _XLAC  # type: ignore[attr-defined]

        if _XLAC._xla_runtime_is_initialized():
            return "uses an XLA device"
        if self._recorder.used:
            return "runs a backward pass"
        new = set(os.listdir("/proc/self/task")) - self._threads
        if names := sorted({name for task in new if (name := _comm(task))}):
            count = f"{len(new)} threads" if len(new) > 1 else "a thread"
            return f"leaves {count} running ({', '.join(names[:3])})"
        return None


def _comm(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it ended between the two looks
