"""A log in the form that rules use: plain lines with rank and cell."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B])")
_RANK = re.compile(
    r"\[(?:rank|default|\w+:)?\s?(\d{1,4})(?: err)?\][:\s]\s?|\(?rank[ =]?(\d{1,4})\)?: "
)
_CELL = re.compile(r"(?:\bcell \[|Cell In ?\[|<ipython-input-|File In \[)(\d+)")
_PIECE = 2000
"""Longer lines are cut into pieces of at most this many characters."""
_SHAPE = bytes(ord("0") if chr(c).isdigit() else ord(chr(c).lower()) for c in range(128)) + bytes(
    range(128, 256)
)
"""Lower case for ASCII letters, 0 for every digit."""
_CELL_DISTANCE = 40
"""Number of lines above a match that are searched for the cell of its traceback."""


def compile_pattern(source: str) -> re.Pattern[str]:
    """Compile a case-insensitive pattern for single lines. Raises re.error if it is invalid."""
    return re.compile(source, re.IGNORECASE | re.MULTILINE)


class LogLines:
    """Some lines of a log, in which patterns are searched."""

    def __init__(self, log: Log, numbers: Sequence[int]) -> None:
        self._log, self._numbers = log, numbers
        self._text = "\n".join(log.bodies[number] for number in numbers)

    def find(self, pattern: re.Pattern[str]) -> list[int]:
        """The numbers of the lines that match, in order."""
        if not pattern.search(self._text):  # of most patterns, no line does
            return []
        return [number for number in self._numbers if pattern.search(self._log.bodies[number])]


class Log:
    """The lines of a log, without colours, with carriage returns as line ends."""

    def __init__(self, text: str) -> None:
        self.lines = _pieces(_plain(_unpacked(text)).split("\n"))
        self.bodies: list[str] = []
        """The lines without the prefixes of ranks."""
        for line in self.lines:
            match = _RANK.match(line)
            self.bodies.append(line[match.end() :] if match else line)

    @cached_property
    def all(self) -> LogLines:
        return LogLines(self, range(len(self.lines)))

    @cached_property
    def shapes(self) -> list[list[int]]:
        """The lines of each shape, in order of the shapes' first lines.

        Lines that differ only in digits ("step 17, loss 0.25") have the same shape.
        """
        shapes: dict[bytes, list[int]] = {}
        lowered = "\n".join(self.lines).encode("utf-8", "surrogatepass").translate(_SHAPE)
        for number, shape in enumerate(lowered.split(b"\n")):
            shapes.setdefault(shape, []).append(number)
        return list(shapes.values())

    def rank(self, number: int) -> int | None:
        """The rank in a line's prefix."""
        match = _RANK.match(self.lines[number])
        return int(match[1] or match[2]) if match else None

    def cell(self, number: int) -> int | None:
        """The last cell that the traceback above a line names."""
        rank = self.rank(number)
        for above in range(number, max(-1, number - _CELL_DISTANCE), -1):
            if rank is not None and self.rank(above) not in (None, rank):
                continue
            if matches := _CELL.findall(self.lines[above]):
                return int(matches[-1])
        return None


def _plain(text: str) -> str:
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _unpacked(text: str) -> str:
    """The text of a log that Kaggle exports as JSON, or of a saved notebook's outputs."""
    start = text.lstrip()[:1]
    if start not in ("[", "{") or not ('"stream_name"' in text or '"nbformat"' in text):
        return text
    try:
        data = json.loads(text)
    except ValueError:
        return text
    if isinstance(data, list):
        return "".join(str(entry.get("data", "")) for entry in data if isinstance(entry, dict))
    outputs = [out for cell in data.get("cells", []) for out in cell.get("outputs", [])]
    return "\n".join(
        part if isinstance(part, str) else "".join(part)
        for out in outputs
        for part in (out.get("text", ""), "\n".join(out.get("traceback", [])))
    )


def _pieces(lines: list[str]) -> list[str]:
    """The lines, long ones cut at spaces."""
    if all(len(line) <= _PIECE for line in lines):
        return lines
    pieces = []
    for line in lines:
        start = 0
        while len(line) - start > _PIECE:
            space = line.rfind(" ", start + _PIECE // 2, start + _PIECE)
            end = space if space > 0 else start + _PIECE
            pieces.append(line[start:end])
            start = end
        pieces.append(line[start:])
    return pieces
