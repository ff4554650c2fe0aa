"""Lines of the script that run for the first time: what a branch does that was never taken before.

Python 3.12 and newer tells of a line until it is told to be silent (`sys.monitoring.DISABLE`), so a
line that has run once is left alone. Older ones have nothing of the kind: there no line is told.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

_TOOLS = (4, 3)
"""Numbers that Python leaves to anybody (0 to 2 and 5 are debuggers', coverage's, profilers')."""


class FirstLines:
    """Watches code from `watch` on."""

    def __init__(self) -> None:
        self._monitoring: Any = getattr(sys, "monitoring", None)
        self._tool: int | None = None
        self._watched = 0
        self._new: list[int] = []

    def watch(self, codes: Sequence[CodeType]) -> None:
        """Watch all of these, of which those that were given before have not changed."""
        if self._monitoring is None or len(codes) == self._watched:
            return
        if self._tool is None and not self._take_a_tool():
            self._monitoring = None
            return
        for code in codes[self._watched :]:
            for part in _parts(code):
                self._monitoring.set_local_events(self._tool, part, self._monitoring.events.LINE)
        self._watched = len(codes)

    def _take_a_tool(self) -> bool:
        for tool in _TOOLS:
            if self._monitoring.get_tool(tool) is None:
                self._monitoring.use_tool_id(tool, "tpunb")
                self._monitoring.register_callback(tool, self._monitoring.events.LINE, self._ran)
                self._tool = tool
                return True
        return False

    def _ran(self, code: CodeType, line: int) -> Any:
        self._new.append(line)
        return self._monitoring.DISABLE

    def take(self) -> list[int]:
        """The lines that have run for the first time since this was asked last, in order."""
        new, self._new = self._new, []
        return new

    def close(self) -> None:
        """Watch nothing more."""
        if self._tool is not None:
            self._monitoring.free_tool_id(self._tool)
            self._monitoring, self._tool = None, None


def _parts(code: CodeType) -> Iterator[CodeType]:
    """A code with those of its functions and classes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
