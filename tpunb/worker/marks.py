"""What a rank sees at the end of each of its steps: that XLA compiled again, and why.

Called with torch_xla's step marker, some microseconds each time. What it tells is what the
report of %%tpu_debug tells, as far as it can be had without looking at single operations.
"""

from __future__ import annotations

import importlib
import json
import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

from tpunb.rundir import append
from tpunb.worker.firsts import FirstLines
from tpunb.worker.loop import Loop, Values, body_around, difference, names_of

WARM = 3
"""Steps of a loop in which programs are new: the optimizer makes its state, sums begin."""
MOST = 20
"""What one rank tells; more would be no news."""
COUNTED = (8, 24)
"""Between these steps of a loop, what leaves the device is counted."""


class Counters(Protocol):
    """What torch_xla counts (tpunb.worker.counters)."""

    def compiled(self) -> int: ...
    def compile_seconds(self) -> float: ...
    def made(self) -> int: ...
    def left(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Again:
    """A program that was compiled although the loop had been through its steps before.

    Or, without seconds, what the loop does at every step that makes it slow.
    """

    step: int
    """How often this line had ended a step, with this one."""
    place: str
    """'cell [4], line 12'."""
    what: str
    """'x has 17 rows, 32 before'."""
    seconds: float | None


class Marks:
    """Watches the step markers of this rank.

    `codes`: of the script's blocks; those that run later are added to it. `acts` are called
    after each step, with its number.
    """

    def __init__(
        self,
        script: str,
        place: Callable[[int], str],
        path: Path,
        counters: Counters,
        codes: Sequence[CodeType],
    ) -> None:
        self._script = script
        self._place = place
        self._path = path
        self._counters = counters
        self._codes = codes
        self._compiled = 0
        self._before_marker = 0
        self._compiled_at: list[int] = []
        """Lines that ran when a rehearsed collective had a program compiled."""
        self._seconds = 0.0
        self._made = 0
        self._told = 0
        self._updated = False
        self._loops: dict[tuple[CodeType, int], Loop] = {}
        self._names: dict[CodeType, tuple[str, ...]] = {}
        self._left: dict[tuple[CodeType, int], dict[str, int]] = {}
        self._firsts = FirstLines()
        self.steps = 0
        self.acts: list[Callable[[int], None]] = []

    def install(self) -> None:
        """From now on, for the rest of this process."""
        torch_xla: Any = importlib.import_module("torch_xla")
        optimizer = importlib.import_module("torch.optim.optimizer")
        marker = torch_xla._XLAC._xla_step_marker

        def marking(*args: Any, **kwargs: Any) -> Any:
            self._before_marker = self._counters.compiled()
            result = marker(*args, **kwargs)
            self.look()
            return result

        compute = torch_xla._XLAC._xla_sync_live_tensors

        def computing(*args: Any, **kwargs: Any) -> Any:
            before = self._counters.compiled()
            result = compute(*args, **kwargs)
            if self._counters.compiled() != before:
                self.computed()
            return result

        torch_xla._XLAC._xla_step_marker = marking
        torch_xla._XLAC._xla_sync_live_tensors = computing
        optimizer.register_optimizer_step_post_hook(self.updated)

    def close(self) -> None:
        """Watch no lines more."""
        self._firsts.close()

    def updated(self, *_: object) -> None:
        """An optimizer has made its step."""
        self._updated = True

    def computed(self) -> None:
        """A rehearsed collective computes what is pending: the first part of a step's program."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self._script:
                self._compiled_at.append(frame.f_lineno)
            frame = frame.f_back

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
        key = frame.f_code, frame.f_lineno
        loop = self._loops.setdefault(key, Loop())
        loop.steps += 1
        updated, self._updated = self._updated, False
        loop.updates += updated
        names = self._names.get(frame.f_code)
        if names is None:
            names = self._names[frame.f_code] = names_of(frame)
        values = loop.values(frame, names)
        total = self._counters.made()
        made, self._made = total - self._made, total
        compiled = self._counters.compiled()
        again = compiled != self._compiled
        if again:
            # Between two steps a value may be read, for which another program is compiled.
            here = compiled != self._before_marker or self._in_body(frame.f_lineno)
            self._compiled = compiled
            warm = loop.steps > WARM and not (updated and loop.updates <= WARM)
            self._again(loop, values, made, frame.f_lineno, here=here, warm=warm)
            self._compiled_at.clear()
        loop.add(values, made, compiled=again)
        self._firsts.take()
        self._firsts.watch(self._codes)
        if loop.steps in COUNTED:
            self._count(key, loop)

    def _again(
        self, loop: Loop, values: Values, made: int, line: int, *, here: bool, warm: bool
    ) -> None:
        """Something was compiled. `here`: for the step's own program; `warm`: it should not."""
        total = self._counters.compile_seconds()
        seconds = max(total - self._seconds, 0.0)
        self._seconds = total
        what = difference(values.shapes, loop.shapes) if loop.steps > WARM else ""
        if not what and here and warm:
            if new := self._firsts.take():
                line = new[0]
                text = linecache.getline(self._script, line).strip()
                what = f"`{text}` ran for the first time"
            elif loop.other_operations(made):
                what = "other operations ran than in the steps before; %%tpu_debug names the line"
            else:
                what = loop.constant(values)
        if what:
            self._tell(Again(loop.steps, self._place(line), what, round(seconds, 3)))

    def _in_body(self, line: int) -> bool:
        """Whether a collective had compiled within the loop whose steps end at a line."""
        if not self._compiled_at:
            return False
        first, last = body_around(line, Path(self._script).read_text(encoding="utf-8"))
        return any(first <= one <= last for one in self._compiled_at)

    def _count(self, key: tuple[CodeType, int], loop: Loop) -> None:
        """What leaves the device at every step: said once for a loop."""
        left = self._counters.left()
        if loop.steps == COUNTED[0]:
            self._left[key] = left
            return
        before = self._left.pop(key)
        steps = COUNTED[1] - COUNTED[0]
        for what, count in left.items():
            if count - before.get(what, 0) >= steps:
                self._tell(Again(loop.steps, self._place(key[1]), what, None))

    def _tell(self, again: Again) -> None:
        if self._told < MOST:
            self._told += 1
            append(self._path, json.dumps(asdict(again)) + "\n")
