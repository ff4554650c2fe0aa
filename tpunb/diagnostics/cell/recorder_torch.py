"""Records what a cell does with torch alone, on a TPU (TorchTPU), on a GPU or on the CPU.

A torch dispatch mode sees every operator, also those of backward passes, with the line of the
notebook that leads to it. Compiled graphs are left to torch.compile's own records.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tpunb.backends.engine_watch import EngineWatch
from tpunb.backends.torch.compilations import CompileWatch
from tpunb.backends.torch.inside import TorchDispatchMode
from tpunb.backends.torchtpu.gaps import find_gap
from tpunb.diagnostics.cell import frames, operations
from tpunb.diagnostics.cell.frames import SourceLine
from tpunb.diagnostics.cell.operations import Op, Shape, find_change
from tpunb.diagnostics.cell.recorder import Compilation, LineKey, LineStats, Recorder
from tpunb.utils.patching import Replacements

_READING = ("_local_scalar_dense", "equal")
"""Operators whose result is a value on the host."""
_OVERWRITING = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_")

_Key = tuple[str, SourceLine | None, bool]
_Signature = tuple[tuple[Shape, ...], tuple[Shape, ...]]
"""The shapes of an operator's tensors and of its results."""


@dataclass
class GapStats(LineStats):
    """An operator that a TPU does not have, or not in this way."""

    problem: str = ""
    instead: str = ""


@dataclass
class Started:
    """Where and when torch.compile started to compile."""

    place: SourceLine | None
    step: int
    again: bool
    """True if the line had run before, in an earlier step."""


class TorchRecorder(Recorder, TorchDispatchMode):
    """The recorder of cells without torch_xla. `on_tpu`: they are written for TorchTPU."""

    # Higher-order operators, as of torch.cond, would raise an error otherwise.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without it, torch.compile would leave all functions as they are below this mode."""
        return True

    def __init__(
        self, files: Container[str], stop_after: int | None = None, *, on_tpu: bool = False
    ) -> None:
        super().__init__(files, stop_after)
        self._on_tpu = on_tpu
        self.gaps: dict[LineKey, GapStats] = {}
        self.started: list[Started] = []
        self.overwritten: set[int] = set()
        """The id() of tensors whose values were replaced, until `Updates` removes them."""
        self.in_backward = False
        self.reduced = False
        """True if a collective has run since the last optimizer step."""
        self.compile = CompileWatch(self._compiling)
        self._lines: dict[_Key, dict[_Signature, int]] = {}
        """What each operator of each line was called with, and in which step first."""
        self._ran: dict[SourceLine | None, int] = {}
        """The step in which each line ran first."""
        self._backward: SourceLine | None = None
        """The line whose backward pass is running, which may be in a thread of the device."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which everything is recorded."""
        engine = _Engine(self)
        show = Replacements({})
        show.begin()
        # torch switches all modes off while it formats a tensor.
        show.set(torch.Tensor, "__repr__", self._showing(torch.Tensor.__repr__))
        self.compile.begin()
        try:
            with self:
                yield
        finally:
            self.compile.end()
            show.end()
            engine.close()

    def _showing(self, show: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(show)
        def represent(tensor: torch.Tensor, **kwargs: Any) -> str:
            begun = time.perf_counter()
            text = show(tensor, **kwargs)
            if not self._quiet and tensor.device.type not in ("cpu", "meta"):
                self._add_read("__repr__", self.place(), time.perf_counter() - begun)
            return text

        return _not_compiled(represent)

    @property
    def programs(self) -> int:
        """How many operators with different shapes ran on the device."""
        return sum(map(len, self._lines.values()))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._quiet:
            return func(*args, **(kwargs or {}))
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begun = time.perf_counter()
        namespace, name = _name(func)
        if name in _OVERWRITING:
            first = args[0]
            self.overwritten.update(map(id, first if isinstance(first, list) else [first]))
        place, compiled = frames.whereabouts(self._files)
        place = place or self._backward
        if self._tail:
            self._leave_tail()
        self._ran.setdefault(place, self.step)
        given = operations.describe_arguments(args, kwargs)
        if self._on_tpu and operations.on_device(given):
            self._note_gap(namespace, name, place, args)
        called = time.perf_counter()
        result = func(*args, **kwargs)
        ended = time.perf_counter()
        self.reduced = self.reduced or namespace == "c10d"
        described = operations.describe_result(result)
        if operations.on_device(given) or operations.on_device(described):
            self.used_device = True
            op = Op(name, place, self.in_optimizer, given, described)
            if not compiled:
                self._note(op, ended - called)
        self._own += time.perf_counter() - ended + called - begun
        return result

    def _note(self, op: Op, seconds: float) -> None:
        taken, left = operations.on_device(op.given), not operations.on_device(op.result)
        if taken and left and (op.name in _READING or operations.on_cpu(op.result)):
            self._note_read(op, seconds)
        else:
            self._note_shapes(op)

    # -- values that leave the device

    def _note_read(self, op: Op, seconds: float) -> None:
        copied = operations.on_cpu(op.result)
        if not (copied and self.in_backward):  # the gradient of a parameter on the CPU
            name = frames.reader_name(self._files) or ("cpu" if copied else "")
            self._add_read(name, op.place, seconds)

    def _add_read(self, name: str, place: SourceLine | None, seconds: float) -> None:
        if not frames.reads_on_purpose():
            self.reads.setdefault((name, place), LineStats(name, place)).add(self.step, seconds)

    # -- shapes, each of which is a program of its own on a TPU

    def _note_shapes(self, op: Op) -> None:
        key = op.name, op.place, torch.is_grad_enabled()
        signature = operations.shapes_in(op.given), operations.shapes_in(op.result)
        known = self._lines.setdefault(key, {})
        if signature in known:
            return
        step = self.step
        earlier = {other: since for other, since in known.items() if since < step}
        known[signature] = step
        if not earlier:
            return
        last = self.compilations[-1] if self.compilations else None
        if last is not None and last.step == step:
            last.size += 1  # it follows from the first
            return
        before = max(earlier, key=lambda other: _alike(other, signature))
        cause = find_change(op, signature, before)
        if cause is not None:
            self.compilations.append(Compilation(op.place, step, 0.0, 1, cause, earlier[before]))

    # -- what a TPU does not have

    def _note_gap(
        self, namespace: str, name: str, place: SourceLine | None, args: tuple[Any, ...]
    ) -> None:
        gap = find_gap(namespace, name, args)
        if gap is not None:
            stats = self.gaps.setdefault((name, place), GapStats(name, place, 0, 0.0, set(), *gap))
            stats.add(self.step, 0.0)

    # -- torch.compile, backward passes and steps

    def _compiling(self) -> None:
        place, _ = frames.whereabouts(self._files)
        place = place or self._backward
        again = self._ran.setdefault(place, self.step) < self.step
        self.started.append(Started(place, self.step, again))
        self._compiled_since = True

    def begin_backward(self, tensors: object) -> None:
        self._backward = self.place() or self._backward
        if not self._quiet:
            for act in self.before_backward:
                act(tensors)

    def optimizer_stepped(self, count: int) -> None:
        self.reduced = False
        if count <= self.optimizer_steps:  # another optimizer of the same step
            return
        for act in self.before_read:
            act()
        self.optimizer_steps = count
        for act in self.after_step:
            act()
        self._end_step()


class _Engine(EngineWatch):
    """Stands in for torch's autograd engine, and reports every backward pass."""

    def __init__(self, recorder: TorchRecorder) -> None:
        super().__init__(lambda: None)
        self._recorder = recorder
        run = self._run

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        self.run_backward = _not_compiled(run_backward)  # type: ignore[method-assign]

    def _run(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self._recorder.begin_backward(tensors)
        self._recorder.in_backward = True
        try:
            return self._engine.run_backward(tensors, *args, **kwargs)
        finally:
            self._recorder.in_backward = False


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which torch.compile does not trace. (Private, as torch.compiler.disable imports
    the compiler; torch 2.9 to 2.13.)
    """
    disabled: Any = torch
    wrapped: Callable[..., Any] = disabled._disable_dynamo(function)
    return wrapped


def _name(func: Any) -> tuple[str, str]:
    """('aten', 'add') of an operator."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "", getattr(func, "__name__", "")
    namespace, _, name = schema.name.partition("::")
    return namespace, name


def _alike(one: _Signature, other: _Signature) -> tuple[bool, int]:
    """How much two signatures have in common."""
    pairs = [*zip(one[0], other[0], strict=False), *zip(one[1], other[1], strict=False)]
    return len(one[0]) == len(other[0]), sum(a == b for a, b in pairs)
