"""A log as rules see it: plain lines, found quickly, each with its rank and its cell."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator
from functools import cached_property

from tpunb.diagnosis.patterns import LinePattern
from tpunb.diagnosis.report import Report

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B])")
_RANK = re.compile(
    r"\[(?:rank|default|\w+:)?\s?(\d{1,4})(?: err)?\][:\s]\s?|\(?rank[ =]?(\d{1,4})\)?: "
)
_DEVICE = re.compile(r"Exception in device=(?:TPU|XLA|CPU):(\d+)|-- Process (\d+) terminated", re.I)
_CELL = re.compile(r"(?:\bcell \[|Cell In ?\[|<ipython-input-|File In \[)(\d+)")
_PIECE = 2000
"""Longer lines are looked at in pieces of at most this many characters."""
_SHAPE = bytes(ord("0") if chr(c).isdigit() else ord(chr(c).lower()) for c in range(128)) + bytes(
    range(128, 256)
)
"""Lower case for ASCII letters, 0 for every digit."""
_CELL_DISTANCE = 40
"""Lines above a hit in which the cell of its traceback is looked for."""


class Log:
    """The lines of a log, without colours, with carriage returns as line ends.

    Lines that differ in digits only ("step 17, loss 0.25") have one shape. Patterns are tried on
    shapes, of which a long log has few: that is what makes a hundred thousand lines quick.
    """

    def __init__(self, text: str) -> None:
        self.lines = _pieces(_plain(_unpacked(text)).split("\n"))
        self._found: dict[tuple[str, int], list[int]] = {}
        self._shapes: dict[bytes, list[int]] = {}
        lowered = "\n".join(self.lines).encode("utf-8", "surrogatepass").translate(_SHAPE)
        for number, shape in enumerate(lowered.split(b"\n")):
            self._shapes.setdefault(shape, []).append(number)
        self._numbers = list(self._shapes.values())
        self._haystack = b"\n".join(self._shapes)
        self._starts = [0, *itertools.accumulate(len(shape) + 1 for shape in self._shapes)]

    @cached_property
    def report(self) -> Report:
        """The numbers of the last metrics report in the log."""
        return Report.read(self.lines)

    def find(self, pattern: LinePattern, most: int = 1) -> list[int]:
        """Numbers of the first lines that match, in order."""
        key = (pattern.source, most)
        if key not in self._found:
            # A shape's lines are in order, but shapes are not.
            found = {number for shape in self._candidates(pattern) for number in shape}
            self._found[key] = sorted(found)[:most]
        return self._found[key]

    def has(self, pattern: LinePattern) -> bool:
        return bool(self.find(pattern))

    def ends_with(self, pattern: LinePattern) -> bool:
        """True if the last line that is not empty matches."""
        numbers = range(len(self.lines) - 1, -1, -1)
        last = next((number for number in numbers if self.lines[number].strip()), None)
        return last is not None and pattern.regex.search(self.body(last)) is not None

    def _candidates(self, pattern: LinePattern) -> Iterator[list[int]]:
        """The lines that match, shape by shape."""
        for fixed in pattern.fixed:
            text = fixed.encode("utf-8", "surrogatepass").translate(_SHAPE)
            position = self._haystack.find(text)
            while position >= 0:
                shape = bisect.bisect_right(self._starts, position) - 1
                numbers = self._numbers[shape]
                if pattern.digits:
                    yield [n for n in numbers if pattern.regex.search(self.body(n))]
                elif pattern.regex.search(self.body(numbers[0])):
                    yield numbers
                position = self._haystack.find(text, self._starts[shape + 1])

    def body(self, number: int) -> str:
        """A line without the prefix that names its rank."""
        line = self.lines[number]
        match = _RANK.match(line)
        return line[match.end() :] if match else line

    def rank(self, number: int) -> int | None:
        """The rank that wrote a line, if the line says so."""
        match = _RANK.match(self.lines[number]) or _DEVICE.search(self.lines[number])
        return int(next(group for group in match.groups() if group)) if match else None

    def cell(self, number: int) -> int | None:
        """The cell that the traceback around a line names last before it."""
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
    """The text inside of a log that Kaggle gives as JSON, or of a saved notebook."""
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
