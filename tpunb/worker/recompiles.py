"""Notices in a rank, at the end of each step, that XLA compiled again, and why.

Called at torch_xla's step marker, and takes some microseconds each time. It gives the causes that
the report of %%tpu_debug gives, as far as they show without examining single operations: shapes of
tensors and values of numbers that the loop's lines name, and how many tensors the operations of a
step have created.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from tpunb.backends.xla.runtime import watch_steps
from tpunb.runs.cell_lines import CellLines
from tpunb.utils.files import append_text
from tpunb.utils.frame_locals import is_function, locals_of

WARM = 3
"""First steps of a loop, in which programs are new: the optimizer makes its state, sums begin."""
MOST = 20
"""Notes of one rank; more would be no news."""
_WIDE = 16
"""Members of a dict or list that is searched for tensors, at most: a batch has few."""
_WAYS = 3
"""Kinds of steps that a loop may have. If there are more, as when threads move batches to the
device, the number of tensors shows nothing."""
_LONGEST = 200
"""Characters of a string that may be a constant of the program, at most."""
_PLAIN = (int, bool, str, float)
_BODIES = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Counters(Protocol):
    """The counters of torch_xla (tpunb.backends.xla.counters)."""

    def compilations_begun(self) -> int: ...
    def compile_seconds(self) -> float: ...
    def tensors_created(self) -> int: ...


@dataclass(frozen=True)
class RecompileNote:
    """A program that was compiled although the loop had run its steps before."""

    step: int
    """How often this line has ended a step, including this one."""
    place: str
    """'cell [4], line 12'."""
    what: str
    """'x has 17 rows, 32 before'."""
    seconds: float


class StepMonitor:
    """Watches the step markers of this rank, and appends notes as JSON lines to `path`.

    The functions in `after_step` are called with the number of each step.
    """

    def __init__(self, lines: CellLines, path: Path, counters: Counters) -> None:
        self._lines = lines
        self._path = path
        self._counters = counters
        self._compiled = 0
        self._before_marker = 0
        self._compiled_at: list[int] = []
        """Lines that were running when a rehearsed collective caused a compilation."""
        self._seconds = 0.0
        self._made = 0
        self._notes = 0
        self._updated = False
        self._loops: dict[tuple[CodeType, int], LoopState] = {}
        self._names: dict[CodeType, tuple[str, ...]] = {}
        self.steps = 0
        self.after_step: list[Callable[[int], None]] = []

    def install(self) -> None:
        """Watch the step markers, for the rest of this process."""
        watch_steps(
            self._begin_marker,
            self.end_step,
            compiled=self._counters.compilations_begun,
            on_part_compiled=self.computed,
        )
        optimizer = importlib.import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_post_hook(self.updated)

    def _begin_marker(self) -> None:
        self._before_marker = self._counters.compilations_begun()

    def updated(self, *_: object) -> None:
        """Note that an optimizer has made its step."""
        self._updated = True

    def computed(self) -> None:
        """Note the running lines: a rehearsed collective had part of a step's program compiled."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if (line := self._script_line(frame)) is not None:
                self._compiled_at.append(line)
            frame = frame.f_back

    def _script_line(self, frame: FrameType) -> int | None:
        return self._lines.script_line(frame.f_code.co_filename, frame.f_lineno)

    def _describe(self, line: int) -> str:
        return self._lines.describe(self._lines.script, line)

    def end_step(self) -> None:
        self.steps += 1
        for callback in self.after_step:
            callback(self.steps)
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and (line := self._script_line(frame)) is None:
            frame = frame.f_back
        if frame is None:
            return
        assert line is not None
        loop = self._loops.setdefault((frame.f_code, line), LoopState())
        loop.steps += 1
        updated, self._updated = self._updated, False
        loop.updates += updated
        names = self._names.get(frame.f_code)
        if names is None:
            names = self._names[frame.f_code] = names_of(frame)
        values = loop.values(frame, names)
        total = self._counters.tensors_created()
        made, self._made = total - self._made, total
        compiled = self._counters.compilations_begun()
        again = compiled != self._compiled
        if again:
            # A value read between two steps may have had another program compiled.
            own = compiled != self._before_marker or self._in_body(line)
            self._compiled = compiled
            warm = loop.steps > WARM and not (updated and loop.updates <= WARM)
            self._again(loop, values, made, line, own=own, warm=warm)
            self._compiled_at.clear()
        loop.add(values, made, compiled=again)

    def _again(
        self, loop: LoopState, values: Values, made: int, line: int, *, own: bool, warm: bool
    ) -> None:
        """Note a compilation. `own`: of the step's own program; `warm`: it was not expected."""
        total = self._counters.compile_seconds()
        seconds = max(total - self._seconds, 0.0)
        self._seconds = total
        what = difference(values.shapes, loop.shapes) if loop.steps > WARM else ""
        if not what and own and warm:
            if loop.other_operations(made):
                what = "other operations ran than in the steps before; %%tpu_debug names the line"
            else:
                what = loop.constant(values)
        if what:
            self._write(RecompileNote(loop.steps, self._describe(line), what, round(seconds, 3)))

    def _in_body(self, line: int) -> bool:
        """True if a collective caused a compilation within the loop whose steps end at a line."""
        if not self._compiled_at:
            return False
        first, last = body_around(line, Path(self._lines.script).read_text(encoding="utf-8"))
        return any(first <= at <= last for at in self._compiled_at)

    def _write(self, note: RecompileNote) -> None:
        if self._notes < MOST:
            self._notes += 1
            # Called in the user's loop, which a full disk must not end.
            with contextlib.suppress(OSError):
                append_text(self._path, json.dumps(asdict(note)) + "\n")


@dataclass
class Values:
    """The values that the lines of a loop name, at the end of a step, in order of the names."""

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    """Numbers and strings that may be constants of the program."""


@dataclass
class LoopState:
    """The state of a loop, by the line that ends its steps."""

    steps: int = 0
    updates: int = 0
    """Steps in which an optimizer made a step."""
    shapes: Shapes = field(default_factory=dict)
    _numbers: dict[str, Any] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    _harmless: set[str] = field(default_factory=set)
    """Numbers that have changed in a step that compiled nothing."""
    _made: set[int] = field(default_factory=set)
    """The numbers of tensors created by steps that compiled nothing."""

    def values(self, frame: FrameType, names: tuple[str, ...]) -> Values:
        """The values in the loop's frame, at the end of a step."""
        named = Values()
        shapes, numbers, harmless = named.shapes, named.numbers, self._harmless
        values = locals_of(frame)
        for name in names:
            value: Any = values.get(name)
            kind = type(value)
            if kind in _PLAIN:
                if name not in harmless and (kind is not str or len(value) <= _LONGEST):
                    numbers[name] = value
            elif isinstance(value, torch.Tensor):
                shapes[name] = (tuple(value.shape), value.dtype)
            elif kind is dict and len(value) <= _WIDE:
                for key, item in value.items():
                    if isinstance(item, torch.Tensor):
                        shapes[f"{name}[{key!r}]"] = (tuple(item.shape), item.dtype)
            elif kind in (list, tuple) and len(value) <= _WIDE:
                for number, item in enumerate(value):
                    if isinstance(item, torch.Tensor):
                        shapes[f"{name}[{number}]"] = (tuple(item.shape), item.dtype)
        return named

    def constant(self, values: Values) -> str:
        """The number that has changed now, and before only when XLA compiled; '' if none has.

        A float is rarely a constant of the program: it counts only if it never changed before.
        """
        changed = [
            name
            for name, now in values.numbers.items()
            if name in self._numbers and _other(now, self._numbers[name])
        ]
        exact = [name for name in changed if type(values.numbers[name]) is not float]
        steady = [name for name in changed if name not in self._changed]
        for name in [*exact, *steady]:
            return f"{name} is {_short(values.numbers[name])}, {_short(self._numbers[name])} before"
        return ""

    def other_operations(self, made: int) -> bool:
        """True if no earlier step created as many tensors, so that this one did something else."""
        return made not in self._made and 0 < len(self._made) <= _WAYS

    def add(self, values: Values, made: int, *, compiled: bool) -> None:
        """Record a step, to compare the next one with."""
        for name, now in values.numbers.items():
            if name in self._numbers and _other(now, self._numbers[name]):
                (self._changed if compiled else self._harmless).add(name)
        if not compiled and len(self._made) <= _WAYS:
            self._made.add(made)
        self.shapes, self._numbers = values.shapes, values.numbers


def names_of(frame: FrameType) -> tuple[str, ...]:
    """The variables that the frame's code names."""
    code: CodeType = frame.f_code
    return (*code.co_varnames, *code.co_cellvars) if is_function(frame) else code.co_names


def body_around(line: int, script: str) -> tuple[int, int]:
    """The first and last line of the innermost loop or function around a line."""
    body = 1, line
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, _BODIES) and node.lineno <= line <= (node.end_lineno or 0):
            body = max(body, (node.lineno, node.end_lineno or 0))
    return body


def difference(now: Shapes, before: Shapes) -> str:
    """The first difference of a tensor's shape or dtype: 'x has 17 rows, 32 before'; or ''."""
    for name, (sizes, dtype) in now.items():
        old_sizes, old_dtype = before.get(name, (sizes, dtype))
        if sizes[1:] == old_sizes[1:] and len(sizes) == len(old_sizes) and sizes != old_sizes:
            return f"{name} has {sizes[0]} rows, {old_sizes[0]} before"
        if sizes != old_sizes:
            return f"{name} is {_by(sizes)}, {_by(old_sizes)} before"
        if dtype != old_dtype:
            return f"{name} is {_word(dtype)}, {_word(old_dtype)} before"
    return ""


def _other(now: object, before: object) -> bool:
    return now is not before and (now != before or type(now) is not type(before))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"


def _by(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes)) or "a single number"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
