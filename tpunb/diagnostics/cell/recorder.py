"""What every recorder of a cell counts: steps and their times, values that are read."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tpunb.diagnostics.cell import frames
from tpunb.diagnostics.cell.frames import Line, SourceLine, StepsDone
from tpunb.diagnostics.cell.operations import Cause


@dataclass
class Compilation:
    """A program that was compiled."""

    place: SourceLine | None
    """The line that started it."""
    step: int
    seconds: float
    size: int
    """Operations of its graph."""
    cause: Cause
    since: int = 0
    """The step whose program it was compared with."""


@dataclass
class LineStats:
    """How often something happened at one line, and how long it took."""

    name: str
    place: SourceLine | None
    count: int = 0
    seconds: float = 0.0
    steps: set[int] = field(default_factory=set)

    def add(self, step: int, seconds: float, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds
        self.steps.add(step)


LineKey = tuple[str, SourceLine | None]


class Recorder(ABC):
    """Records what the cell does, from `__enter__` to `__exit__` of its subclass.

    `files`: the names under which the notebook's cells were compiled. `stop_after`: the number
    of steps after which StepsDone is raised.
    """

    def __init__(self, files: Container[str], stop_after: int | None = None) -> None:
        super().__init__()
        self._files = files
        self._stop_after = stop_after
        self.compilations: list[Compilation] = []
        self.reads: dict[LineKey, LineStats] = {}
        self.optimizer_steps = 0
        self.in_optimizer = False
        self.intervals: list[float] = []
        """Seconds between the ends of steps, without steps that compiled."""
        self.used_device = False
        self.before_read: list[Callable[[], None]] = []
        """Called before the end of a step, when operations can still be added to it."""
        self.after_step: list[Callable[[], None]] = []
        """Called after it, when results can be read."""
        self.before_backward: list[Callable[[object], None]] = []
        self._quiet = 0
        self._own = 0.0
        self._last_end: float | None = None
        self._compiled_since = False
        self._stopping = False
        self._tail: list[Line] = []
        """The running lines at the end of a step, until the next step begins."""

    def place(self) -> SourceLine | None:
        return frames.innermost_line(self._files)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context whose operations are not recorded."""
        begun = time.perf_counter()
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1
            self._own += time.perf_counter() - begun

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self.optimizer_steps

    @property
    def step(self) -> int:
        """The current step, from 1; its body below the end of its step belongs to it."""
        return self.steps + (0 if self._tail else 1)

    def _end_step(self) -> None:
        """Record the end of a step."""
        self._time()
        self._tail = frames.step_ended(self._files)
        self._stopping = self._stop_after is not None and self.steps >= self._stop_after
        if self._stopping and not self._tail:
            raise StepsDone

    def _leave_tail(self) -> None:
        """Leave the body of the step that has ended, if the next step has begun."""
        if frames.next_began(frames.running_lines(self._files), self._tail):
            self._tail = []
            if self._stopping:
                raise StepsDone

    @abstractmethod
    def optimizer_stepped(self, count: int) -> None:
        """Record an optimizer step; `count`: the largest number of steps of any optimizer."""

    def _time(self) -> None:
        now = time.perf_counter()
        if self._last_end is not None and not self._compiled_since:
            self.intervals.append(max(now - self._last_end - self._own, 0.0))
        self._last_end, self._own, self._compiled_since = now, 0.0, False
