"""A cell while it becomes plain Python: lines are replaced or left out, and stay as many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

PASS = "pass  # "


class NotPythonError(Exception):
    """A line that has no plain Python form. `line` is its line in the cell, from 1."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason, line)
        self.reason = reason
        self.line = line


class Lost(NamedTuple):
    """A name that a line has made in the notebook, and does not make in a script."""

    line: int
    """In the cell, from 1."""
    name: str
    maker: str
    """The line, or the beginning of it."""


@dataclass
class Cell:
    """The lines of a cell, what was left out of them, and which names that has cost."""

    lines: list[str]
    left_out: list[tuple[int, str, str]] = field(default_factory=list)
    """Line (from 1), text, reason."""
    lost: list[Lost] = field(default_factory=list)

    def drop(self, first: int, count: int, reason: str) -> None:
        """Turn lines (from 0) into comments, with `pass` before the first if it is indented."""
        taken = self.lines[first : first + count]
        text = taken[0].strip()
        self.left_out.append((first + 1, text + (" …" if count > 1 else ""), reason))
        indent = taken[0][: len(taken[0]) - len(taken[0].lstrip())]
        mark = PASS if indent else "# "
        self.lines[first] = f"{indent}{mark}left out ({reason}): {text}"
        self._comment_out(first + 1, first + count)

    def put(self, first: int, count: int, line: str) -> None:
        """Put one line in the place of lines (from 0); the others become comments."""
        self.lines[first] = line
        self._comment_out(first + 1, first + count)

    def lose(self, line: int, maker: str, names: Iterable[str]) -> None:
        """Note names that line (from 1) does not make here."""
        self.lost += [Lost(line, name, maker.strip()) for name in names]

    def _comment_out(self, first: int, last: int) -> None:
        for index in range(first, last):
            # The bar keeps "%%" and "!" away from the start of the comment, where notebook
            # editors would take them for a new cell or for a magic.
            self.lines[index] = f"# | {self.lines[index]}".rstrip()


def is_pass(line: str) -> bool:
    """Whether a line is one that was left out, with `pass` before it."""
    return line.lstrip().startswith(PASS)


def without_pass(line: str) -> str:
    """Such a line as a mere comment."""
    return line.replace(PASS, "# ", 1)
