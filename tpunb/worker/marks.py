"""What a rank sees at the end of each of its steps: that XLA compiled again, and why.

Called with torch_xla's step marker, some microseconds each time. The shapes of the tensors that
the loop's lines know are kept from one step to the next, so that a program that is new can be
told by what had another shape. Branches and constants are not seen here: %%tpu_debug names them.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from tpunb.rundir import append

WARM = 3
"""Steps of a loop in which programs are new: the optimizer makes its state, sums begin."""
MOST = 20
"""What one rank tells; more would be no news."""
_WIDE = 16
"""Members of a dict or list that are looked at: a batch has few."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Again:
    """A program that was compiled although the loop had been through its steps before."""

    step: int
    """How often this line had ended a step, with this one."""
    place: str
    """'cell [4], line 12'."""
    what: str
    """'x has 17 rows, 32 before'."""
    seconds: float


@dataclass
class _Loop:
    """A line that ends steps."""

    steps: int = 0
    shapes: Shapes = field(default_factory=dict)


class Marks:
    """Watches the step markers of this rank.

    `compiled` and `seconds`: programs compiled so far, and how long that took. `acts` are called
    after each step, with its number.
    """

    def __init__(
        self,
        script: str,
        place: Callable[[int], str],
        path: Path,
        compiled: Callable[[], int],
        seconds: Callable[[], float],
    ) -> None:
        self._script = script
        self._place = place
        self._path = path
        self._programs, self._time = compiled, seconds
        self._compiled = 0
        self._seconds = 0.0
        self._told = 0
        self._loops: dict[tuple[CodeType, int], _Loop] = {}
        self._names: dict[CodeType, tuple[str, ...]] = {}
        self.steps = 0
        self.acts: list[Callable[[int], None]] = []

    def install(self) -> None:
        """From now on, for the rest of this process."""
        torch_xla: Any = importlib.import_module("torch_xla")
        marker = torch_xla._XLAC._xla_step_marker

        def marking(*args: Any, **kwargs: Any) -> Any:
            result = marker(*args, **kwargs)
            self.look()
            return result

        torch_xla._XLAC._xla_step_marker = marking

    def look(self) -> None:
        """A step has ended."""
        self.steps += 1
        for act in self.acts:
            act(self.steps)
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != self._script:
            frame = frame.f_back
        if frame is None:
            return
        loop = self._loops.setdefault((frame.f_code, frame.f_lineno), _Loop())
        loop.steps += 1
        shapes = self._shapes(frame)
        compiled = self._programs()
        if compiled != self._compiled:
            total = self._time()
            seconds = max(total - self._seconds, 0.0)
            self._compiled, self._seconds = compiled, total
            what = difference(shapes, loop.shapes)
            if what and loop.steps > WARM and self._told < MOST:
                self._told += 1
                again = Again(loop.steps, self._place(frame.f_lineno), what, round(seconds, 3))
                append(self._path, json.dumps(asdict(again)) + "\n")
        loop.shapes = shapes

    def _shapes(self, frame: FrameType) -> Shapes:
        """Of the tensors that the frame's code names, in the order of its names."""
        code = frame.f_code
        names = self._names.get(code)
        if names is None:
            at_top = frame.f_locals is frame.f_globals
            own = code.co_names if at_top else (*code.co_varnames, *code.co_cellvars)
            names = self._names[code] = tuple(own)
        values = frame.f_locals
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in names:
            value: Any = values.get(name)
            if isinstance(value, torch.Tensor):
                found[name] = (tuple(value.shape), value.dtype)
            elif type(value) is dict and len(value) <= _WIDE:
                for key, one in value.items():
                    if isinstance(one, torch.Tensor):
                        found[f"{name}[{key!r}]"] = (tuple(one.shape), one.dtype)
            elif type(value) in (list, tuple) and len(value) <= _WIDE:
                for number, one in enumerate(value):
                    if isinstance(one, torch.Tensor):
                        found[f"{name}[{number}]"] = (tuple(one.shape), one.dtype)
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


def _by(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes)) or "a single number"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
