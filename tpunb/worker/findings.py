"""What the prelude has done to a process that must not be done before ranks are forked.

Measured with torch 2.9 and torch_xla 2.9: after a backward pass in the parent, backward on an
XLA tensor fails in a child with an internal assertion; an initialised XLA runtime does not
survive a fork; of several threads only the forking one goes on in the child, and the locks
that others held stay locked.
"""

from __future__ import annotations

import os

from tpunb.worker.autograd import EngineWatch


class Findings:
    """Watches a process from before the prelude; `look` says what forbids a fork now.

    Private name, checked on torch_xla 2.8 and 2.9: `torch_xla._XLAC._xla_runtime_is_initialized`.
    """

    def __init__(self) -> None:
        self._backward = False
        self._watch = EngineWatch(self._note_backward)
        self._threads = set(os.listdir("/proc/self/task"))

    def _note_backward(self) -> None:
        self._backward = True

    def close(self) -> None:
        """Stop watching."""
        self._watch.close()

    def look(self) -> str | None:
        """What was found first, as the rest of a sentence that begins with the cell; or None."""
        from torch_xla import _XLAC  # type: ignore[attr-defined]

        if _XLAC._xla_runtime_is_initialized():
            return "uses an XLA device"
        if self._backward:
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
