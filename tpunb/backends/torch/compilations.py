"""What torch.compile did: each compilation with its reason, each graph break with its lines.

The only module that uses these private names of torch (checked on 2.9 and 2.13):
`torch._dynamo.callback.callback_handler`, and of `torch._dynamo.utils` `get_compilation_metrics`
and `graph_break_reasons`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tpunb.backends.torch.steps import CALLBACK
from tpunb.utils.patching import Replacements

RESUMED = "torch_dynamo_resume_in_"
"""The beginning of the names that torch gives to the rest of a function behind a graph break."""


@dataclass(frozen=True)
class CompiledFrame:
    """A function that torch.compile has compiled, or has given up."""

    number: int
    """The position of its start among all starts; -1 if it was not even started."""
    function: str
    file: str
    line: int
    """The first line of the function."""
    seconds: float
    reason: str
    """Why it was compiled again; "" for the first time."""
    given_up: str
    """Why it runs without being compiled; "" if it was compiled."""
    given_up_line: int


@dataclass(frozen=True)
class GraphBreak:
    """A place where torch.compile ended a graph, and continued behind it with another."""

    number: int
    """How many compilations had started."""
    reason: str
    lines: Sequence[tuple[str, int]]
    """File and line on the call stack, innermost last."""


class CompileWatch:
    """Collects what torch.compile does from `begin` to `end`. Does not import torch.compile.

    `started`: called at the start of each compilation, in the thread and below the frames of the
    code that caused it.
    """

    def __init__(self, started: Callable[[], None]) -> None:
        self._started = started
        self._names = Replacements({CALLBACK: self._watch})
        self._handler: Any = None
        self._starts: list[str] = []
        self._ids: dict[str, CompiledFrame] = {}
        self._last: Any = None
        self._breaks_seen = 0
        self.frames: list[CompiledFrame] = []
        self.at_limit: list[CompiledFrame] = []
        """The last compilations of functions that torch does not compile again."""
        self.breaks: list[GraphBreak] = []

    def begin(self) -> None:
        self._names.begin()

    def end(self) -> None:
        self._names.end()
        if self._handler is not None:
            if self._start in self._handler.start_callbacks:
                self._handler.remove_start_callback(self._start)
            self.collect()

    def _watch(self, callback: ModuleType) -> None:
        utils: Any = sys.modules.get("torch._dynamo.utils")
        if utils is not None:  # otherwise nothing has been compiled so far
            self._last = (utils.get_compilation_metrics() or [None])[-1]
            self._breaks_seen = len(utils.graph_break_reasons)
        self._handler = callback.callback_handler
        self._handler.register_start_callback(self._start)
        self._names.set(self._handler, "clear", self._clear)

    def _clear(self) -> None:
        """The handler's `clear`, which torch._dynamo.reset() calls."""
        self.collect()
        type(self._handler).clear(self._handler)
        self._handler.register_start_callback(self._start)

    def _start(self, arguments: Any) -> None:
        self.collect()
        self._starts.append(str(arguments.compile_id))
        self._started()

    def collect(self) -> None:
        """Take in what was compiled since the last time: torch keeps only the newest 64."""
        utils: Any = sys.modules["torch._dynamo.utils"]
        for metrics in _after(utils.get_compilation_metrics(), self._last):
            self._last = metrics
            if metrics.co_name is not None:
                self._ids[str(metrics.compile_id)] = self._frame(metrics)
                self.frames.append(self._ids[str(metrics.compile_id)])
            elif metrics.fail_reason:
                self._note_limit(str(metrics.compile_id))
        reasons = utils.graph_break_reasons
        if len(reasons) < self._breaks_seen:  # torch._dynamo.reset() clears it
            self._breaks_seen = 0
        for reason in reasons[self._breaks_seen :]:
            lines = [(entry.filename, entry.lineno) for entry in reason.user_stack]
            self.breaks.append(GraphBreak(len(self._starts), reason.reason, lines))
        self._breaks_seen = len(reasons)

    def _frame(self, metrics: Any) -> CompiledFrame:
        compile_id = str(metrics.compile_id)
        backwards = range(len(self._starts) - 1, -1, -1)
        number = next((n for n in backwards if self._starts[n] == compile_id), -1)
        return CompiledFrame(
            number=number,
            function=metrics.co_name,
            file=metrics.co_filename,
            line=metrics.co_firstlineno,
            seconds=metrics.entire_frame_compile_time_s or 0.0,
            reason=str(metrics.recompile_reason or ""),
            given_up=str(metrics.fail_reason or ""),
            given_up_line=metrics.fail_user_frame_lineno or 0,
        )

    def _note_limit(self, compile_id: str) -> None:
        """Note a compilation that was refused before it started: "0/8" is the ninth of a frame."""
        config: Any = sys.modules["torch._dynamo.config"]
        frame, _, count = compile_id.partition("/")
        last = self._ids.get(f"{frame}/{int(count) - 1}") if count.isdecimal() else None
        if last is not None and int(count) >= config.recompile_limit:
            self.at_limit.append(last)


def _after(entries: Sequence[Any], last: Any) -> Sequence[Any]:
    """The entries behind the last one that is known; all if it is no longer among them."""
    known = next((n for n, entry in enumerate(entries) if entry is last), -1)
    return entries[known + 1 :]
