"""`--profile`: in chosen ranks, a trace of some steps for xprof, written by the rank itself."""

from __future__ import annotations

import atexit
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpunb.profile import Profile


class Tracing:
    """Begins and ends the trace of one rank; `tell` says to the person where it is."""

    def __init__(self, profile: Profile, folder: Path, tell: Callable[[str], None]) -> None:
        self._profile = profile
        self._folder = folder
        self._tell = tell
        self._running = False
        if profile.first == 1:
            self._begin()

    def after(self, step: int) -> None:
        """A step has ended, the first of this process is 1."""
        if step == self._profile.last:
            self._end()
        elif step == self._profile.first - 1:
            self._begin()

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        _profiler().start_trace(str(self._folder))
        self._running = True
        atexit.register(self._end)  # the loop may have fewer steps

    def _end(self) -> None:
        if self._running:
            self._running = False
            _profiler().stop_trace()
            self._tell(f"trace of steps {self._profile.first} to {self._profile.last}: "
                       f"{self._folder}; to open it: pip install xprof, then "
                       f"xprof --logdir {self._folder}")  # fmt: skip


def _profiler() -> Any:
    return importlib.import_module("torch_xla.debug.profiler")
