"""What a rank keeps of a loop from one step to the next, to say why its program is another one.

Shapes of the tensors that the loop's lines name, numbers that they name, and how many tensors
the operations of a step have made: some microseconds a step. Lines that ran for the first time
are told by Python itself (tpunb.worker.firsts).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

_WIDE = 16
"""Members of a dict or list that are looked at: a batch has few."""
_WAYS = 3
"""So many kinds of steps may a loop have; with more, as where threads bring batches to the device,
the number of tensors says nothing."""
_PLAIN = (int, bool, str, float)
_BODIES = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass
class Values:
    """What the lines of a loop name at the end of a step, in the order of its code's names."""

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    """Numbers and words that may be constants of the program."""


@dataclass
class Loop:
    """A line that ends steps."""

    steps: int = 0
    updates: int = 0
    """Steps in which an optimizer made its own."""
    shapes: Shapes = field(default_factory=dict)
    _numbers: dict[str, Any] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    _harmless: set[str] = field(default_factory=set)
    """Numbers that have changed in a step that compiled nothing."""
    _made: set[int] = field(default_factory=set)
    """How many tensors steps have made that compiled nothing."""

    def values(self, frame: FrameType, names: tuple[str, ...]) -> Values:
        """Of the loop's frame, at the end of a step."""
        found = Values()
        shapes, numbers, harmless = found.shapes, found.numbers, self._harmless
        values = frame.f_locals
        for name in names:
            value: Any = values.get(name)
            kind = type(value)
            if kind in _PLAIN:
                if name not in harmless:
                    numbers[name] = value
            elif isinstance(value, torch.Tensor):
                shapes[name] = (tuple(value.shape), value.dtype)
            elif kind is dict and len(value) <= _WIDE:
                for key, one in value.items():
                    if isinstance(one, torch.Tensor):
                        shapes[f"{name}[{key!r}]"] = (tuple(one.shape), one.dtype)
            elif kind in (list, tuple) and len(value) <= _WIDE:
                for number, one in enumerate(value):
                    if isinstance(one, torch.Tensor):
                        shapes[f"{name}[{number}]"] = (tuple(one.shape), one.dtype)
        return found

    def constant(self, values: Values) -> str:
        """The number that has changed now, and never before but where XLA compiled; '' if none.

        Of floats that are neither 0 nor 1 few are constants: only one that stood until now.
        """
        changed = [
            name
            for name, now in values.numbers.items()
            if name in self._numbers and _other(now, self._numbers[name])
        ]
        steady = [one for one in changed if one not in self._changed]
        for name in [*(one for one in changed if type(values.numbers[one]) is not float), *steady]:
            return f"{name} is {_short(values.numbers[name])}, {_short(self._numbers[name])} before"
        return ""

    def other_operations(self, made: int) -> bool:
        """Whether a step that made so many tensors did something else than all before."""
        return made not in self._made and 0 < len(self._made) <= _WAYS

    def add(self, values: Values, made: int, *, compiled: bool) -> None:
        """Keep a step to compare the next with."""
        for name, now in values.numbers.items():
            if name in self._numbers and _other(now, self._numbers[name]):
                (self._changed if compiled else self._harmless).add(name)
        if not compiled and len(self._made) <= _WAYS:
            self._made.add(made)
        self.shapes, self._numbers = values.shapes, values.numbers


def names_of(frame: FrameType) -> tuple[str, ...]:
    """The variables that the frame's code names."""
    code: CodeType = frame.f_code
    at_top = frame.f_locals is frame.f_globals
    return tuple(code.co_names if at_top else (*code.co_varnames, *code.co_cellvars))


def body_around(line: int, script: str) -> tuple[int, int]:
    """The first and last line of the innermost loop or function in which a line stands."""
    found = 1, line
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, _BODIES) and node.lineno <= line <= (node.end_lineno or 0):
            found = max(found, (node.lineno, node.end_lineno or 0))
    return found


def difference(now: Shapes, before: Shapes) -> str:
    """What the first tensor with another shape has now and had before; '' if none has."""
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
