"""Records what a cell does with XLA: operations, programs, values that are read, steps.

A torch function mode intercepts every call of torch's functions from Python, with the line of the
notebook that makes it. torch_xla's counters before and after the call show its effects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tpunb.backends.xla import counters, runtime
from tpunb.backends.xla.counters import Counts
from tpunb.diagnostics.cell import frames, operations
from tpunb.diagnostics.cell.frames import SourceLine, StepsDone
from tpunb.diagnostics.cell.operations import (
    ALIKE,
    Cause,
    Op,
    Window,
    find_cause,
    is_variant,
    similarity,
    varying_arguments,
)
from tpunb.diagnostics.cell.recorder import Compilation, LineKey, LineStats, Recorder

_PROPERTIES = frozenset(("__get__", "__set__", "is_complex", "is_floating_point", "requires_grad_"))
_READING = frozenset(
    "item tolist __bool__ __float__ __int__ __index__ __complex__ __format__ __repr__ __array__ "
    "__contains__ equal allclose is_nonzero".split()
)
"""Functions that read a value: their result is not a tensor."""
_KEPT = 12
"""Number of programs of one line with which a new one is compared."""
_LONGEST = 50_000
"""Maximal number of operations that are kept of a program that does not end."""


@dataclass
class _Site:
    """A line that starts programs."""

    last: Window | None = None
    last_step: int = 0
    begin: int = 0
    """The start of its next window, as a number of operations."""
    known: list[tuple[int, Window]] = field(default_factory=list)
    """Its programs, and the steps in which they first occurred."""
    harmless: set[tuple[object, ...]] = field(default_factory=set)

    def remember(self, step: int, window: Window) -> None:
        """Keep a program for comparison with later ones."""
        self.known = [*self.known, (step, window)][-_KEPT:]


class XlaRecorder(Recorder, TorchFunctionMode):
    """The recorder of cells that use torch_xla."""

    def __init__(self, files: Container[str], stop_after: int | None = None) -> None:
        super().__init__(files, stop_after)
        self.variants: list[Compilation] = []
        """Programs that were only not compiled because an earlier cell had compiled them."""
        self.fallbacks: dict[LineKey, LineStats] = {}
        self.started = 0
        self.marks = 0
        """Step markers that started a program."""
        self._ops: list[Op] = []
        self._dropped = 0
        self._sites: dict[LineKey, _Site] = {}
        self._counts = counters.read_counts()
        self._compile_seconds = counters.compile_seconds() if runtime.is_running() else 0.0
        self._stepped = False
        self._tail_ops = 0
        """Number of operations that belong to the body of the step that has ended."""

    # -- operations

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():  # otherwise torch.compile would trace this as well
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._quiet or name in _PROPERTIES:
            return func(*args, **(kwargs or {}))
        return self._call(func, name, args, kwargs or {})

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begun = time.perf_counter()
        given = operations.describe_arguments(args, kwargs)
        if self._tail:
            self._leave_tail()
        place = self.place()
        if name == "backward":
            for act in self.before_backward:
                act(args[0])
        called = time.perf_counter()
        result = func(*args, **kwargs)
        ended = time.perf_counter()
        described = operations.describe_result(result)
        taken = operations.on_device(given)
        self.used_device = self.used_device or taken
        if taken or operations.on_device(described) or name == "backward":
            before, after = self._recount()
            op = Op(name, place, self.in_optimizer, given, described)
            read = taken and not operations.on_device(described)
            is_reader = name in _READING and after.read > before.read
            read = read and (is_reader or operations.on_cpu(described))
            if not read and op.builds:
                self._add(op)
            self._note_effects(op, before, after, ended - called, read)
        self._own += time.perf_counter() - ended + called - begun
        return result

    def _add(self, op: Op) -> None:
        self._ops.append(op)
        if self._tail:
            self._tail_ops = len(self._ops)
        if len(self._ops) > 2 * _LONGEST:
            del self._ops[:_LONGEST]
            self._dropped += _LONGEST

    def _note_effects(
        self, op: Op, before: Counts, after: Counts, seconds: float, read: bool
    ) -> None:
        """Record the effects of an operation. `read`: its result is on the host."""
        compiling = 0.0
        if after.started > before.started:
            compiling = self._program(op.name, op.place, after.compiled > before.compiled)
        spent = max(seconds - compiling, 0.0)
        if after.fallbacks > before.fallbacks:
            stats = self.fallbacks.setdefault(op.key, LineStats(op.name, op.place))
            stats.add(self.step, spent, after.fallbacks - before.fallbacks)
        elif read and not frames.reads_on_purpose():
            self.reads.setdefault(op.key, LineStats(op.name, op.place)).add(self.step, spent)

    def _recount(self) -> tuple[Counts, Counts]:
        """torch_xla's counts after the last operation, and now."""
        before = self._counts
        self._counts = counters.read_counts()
        return before, self._counts

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context whose operations are not recorded."""
        with super().quiet():
            try:
                yield
            finally:
                self._recount()

    # -- programs

    @property
    def steps(self) -> int:
        return self.optimizer_steps or self.marks

    @property
    def step(self) -> int:
        begun = 0 if self._tail else 1
        if self.optimizer_steps:
            return self.optimizer_steps + (0 if self._stepped else begun)
        return self.marks + begun

    def _program(self, name: str, place: SourceLine | None, compiled: bool) -> float:
        """Record a program that a line started; returns the seconds of its compilation."""
        self.started += 1
        site = self._sites.setdefault((name, place), _Site())
        begin = max(site.begin - self._dropped, 0)
        tail = max(self._tail_ops - begin, 0)
        window = Window(tuple(self._ops[begin:]), tail, first=site.last is None)
        site.begin = self._dropped + len(self._ops)
        seconds = 0.0
        if compiled:
            self._compiled_since = True
            total = counters.compile_seconds()
            seconds, self._compile_seconds = max(total - self._compile_seconds, 0.0), total
            since, cause = self._cause(site, window)
            size = counters.graph_size()
            self.compilations.append(Compilation(place, self.step, seconds, size, cause, since))
            site.remember(self.step, window)
        elif site.last is not None:
            site.harmless |= varying_arguments(window, site.last)
            self._variant(site, window, place)
        else:
            site.remember(self.step, window)
        site.last, site.last_step = window, self.step
        return seconds

    def _cause(self, site: _Site, window: Window) -> tuple[int, Cause]:
        last = [] if site.last is None else [(site.last_step, site.last)]
        known = [*last, *reversed(site.known)]
        best = max(known, key=lambda program: similarity(window, program[1]), default=None)
        if best is None or similarity(window, best[1]) < ALIKE:
            return 0, Cause("other")
        return best[0], find_cause(window, best[1], site.harmless)

    def _variant(self, site: _Site, window: Window, place: SourceLine | None) -> None:
        """Record a program that is new in this cell, but was compiled for an earlier cell."""
        assert site.last is not None
        known = [site.last, *(program for _, program in site.known)]
        if not all(is_variant(window, program) for program in known):
            return
        since, cause = self._cause(site, window)
        if cause.kind in ("shape", "dtype", "data", "branch"):
            self.variants.append(Compilation(place, self.step, 0.0, 0, cause, since))
        site.remember(self.step, window)

    # -- steps

    def wrap_marker(self, marker: Callable[..., Any]) -> Callable[..., Any]:
        def marking(*args: Any, **kwargs: Any) -> Any:
            if self._quiet:
                return marker(*args, **kwargs)
            if self._tail:
                self._leave_tail()
            for act in self.before_read:
                act()
            result = marker(*args, **kwargs)
            before, after = self._recount()
            place = self.place()
            if after.started > before.started:
                self._program("torch_xla.sync", place, after.compiled > before.compiled)
                self._end_step()
                for act in self.after_step:
                    act()
            return result

        return marking

    def _end_step(self) -> None:
        """Record the end of a step, whose program was started."""
        self.marks += 1
        self._stepped = False
        self._dropped += len(self._ops)
        self._ops.clear()
        self._tail_ops = 0
        for site in self._sites.values():
            site.begin = self._dropped
        super()._end_step()

    def optimizer_stepped(self, count: int) -> None:
        if self._stepped and count > self.optimizer_steps:
            # The loop has no step marker, so its steps end here.
            self._time()
            if self._stop_after is not None and count > self._stop_after:
                raise StepsDone
        self.optimizer_steps = count
        self._stepped = True
