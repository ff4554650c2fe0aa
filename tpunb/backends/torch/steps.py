"""Optimizer steps and compilations of plain torch code, counted for the heartbeat.

They are counted where they happen, without a thread: a process with one thread can be forked
without a warning, for example by a DataLoader.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tpunb.backends.engine_watch import EngineWatch
from tpunb.runs import heartbeat
from tpunb.runs.heartbeat import Counts
from tpunb.utils.patching import Replacements

if TYPE_CHECKING:
    from torch.optim import Optimizer

CALLBACK = "torch._dynamo.callback"
"""torch.compile's own hooks around each compilation (`callback_handler`; torch 2.9 to 2.15)."""


class Steps:
    """The steps and compilations of this process."""

    def __init__(self) -> None:
        self.steps = 0
        self.after_step: list[Callable[[int], None]] = []
        """Called with the number of each optimizer step."""
        self._begun = 0
        self._ended = 0
        self._nanoseconds = 0
        self._since = 0
        self._on_device = 0
        """Steps that changed parameters of a device other than the CPU."""

    def watch(self) -> None:
        """Count for the rest of this process. torch.compile is not imported for it."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)
        EngineWatch(heartbeat.note_backward)
        Replacements({CALLBACK: self._watch_compilations}).begin()

    def counts(self) -> Counts:
        """The counts for the heartbeat."""
        compilations = self._begun, self._ended, self._nanoseconds
        return (self.steps, *compilations, self.steps, self._on_device)

    def _stepped(self, optimizer: Optimizer, args: object, options: object) -> None:
        compiler: Any = sys.modules["torch"].compiler
        if not compiler.is_compiling():
            self.steps += 1
            first = (each for group in optimizer.param_groups for each in group["params"][:1])
            # With CPUOffloadPolicy, FSDP2 keeps its parameters, DTensors, on the CPU.
            self._on_device += any(not p.is_cpu or hasattr(p, "device_mesh") for p in first)
            heartbeat.complete_counts()
            for function in self.after_step:
                function(self.steps)

    def _watch_compilations(self, callback: ModuleType) -> None:
        handler = callback.callback_handler
        clear = handler.clear

        def register() -> None:
            handler.register_start_callback(self._begin_compilation)
            handler.register_end_callback(self._end_compilation)

        def clear_and_register() -> None:  # torch._dynamo.reset() clears all callbacks
            clear()
            register()

        register()
        handler.clear = clear_and_register

    def _begin_compilation(self, *args: object) -> None:
        self._begun += 1
        self._since = time.perf_counter_ns()
        heartbeat.complete_counts()

    def _end_compilation(self, *args: object) -> None:
        self._ended += 1
        self._nanoseconds += time.perf_counter_ns() - self._since
        heartbeat.complete_counts()


steps = Steps()
