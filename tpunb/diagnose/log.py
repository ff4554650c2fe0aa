"""A log as rules see it: plain lines, found quickly, each with its rank and its cell."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator
from functools import cached_property

from tpunb.diagnose.patterns import LinePattern
from tpunb.diagnose.report import Report

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B])")
_RANK = re.compile(r"\[(?:rank|default|\w+:)?\s?(\d{1,4})(?: err)?\][:\s]\s?|\(?rank[ =]?(\d{1,4})\)?: ")
_DEVICE = re.compile(r"Exception in device=(?:TPU|XLA|CPU):(\d+)|-- Process (\d+) terminated", re.I)
_CELL = re.compile(r"(?:\bcell \[|Cell In ?\[|<ipython-input-|File In \[)(\d+)")
_LONGEST = 2000
"""Characters of a line that are looked at on either side of a hit."""
_CELL_DISTANCE = 40
"""Lines above a hit in which the cell of its traceback is looked for."""


class Log:
    """The lines of a log, without colours, with carriage returns as line ends."""

    def __init__(self, text: str) -> None:
        self.lines = _plain(_unpacked(text)).split("\n")
        self._lowered = "\n".join(self.lines).lower()
        self._found: dict[tuple[str, int], list[int]] = {}

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line begins in the lowered text."""
        lengths = (len(line) + 1 for line in self._lowered.split("\n"))
        return [0, *itertools.accumulate(lengths)]

    @cached_property
    def report(self) -> Report:
        """The numbers of the last metrics report in the log."""
        return Report.read(self.lines)

    def find(self, pattern: LinePattern, most: int = 1) -> list[int]:
        """Numbers of the first lines that match, in order."""
        key = (pattern.source, most)
        if key not in self._found:
            self._found[key] = list(itertools.islice(self._matches(pattern), most))
        return self._found[key]

    def has(self, pattern: LinePattern) -> bool:
        return bool(self.find(pattern))

    def ends_with(self, pattern: LinePattern) -> bool:
        """True if the last line that is not empty matches."""
        numbers = range(len(self.lines) - 1, -1, -1)
        last = next((number for number in numbers if self.lines[number].strip()), None)
        return last is not None and pattern.regex.search(self.body(last)) is not None

    def _matches(self, pattern: LinePattern) -> Iterator[int]:
        # Each iterator yields the lines of one fixed text in order: merged, they stay so.
        found = itertools.chain.from_iterable(
            self._lines_with(text, pattern) for text in pattern.fixed
        )
        if len(pattern.fixed) > 1:
            found = iter(sorted(set(found)))
        return iter(found)

    def _lines_with(self, fixed: str, pattern: LinePattern) -> Iterator[int]:
        """Lines that hold the fixed text and match: far fewer are tried than there are."""
        position = self._lowered.find(fixed)
        while position >= 0:
            number = bisect.bisect_right(self._starts, position) - 1
            start, end = self._starts[number], self._starts[number + 1]
            line = self.lines[number]
            if end - start > 2 * _LONGEST:
                middle = position - start
                line = line[max(0, middle - _LONGEST) : middle + _LONGEST]
                end = position + _LONGEST  # the next hit may be further on in the same line
            else:
                line = self.body(number)
            if pattern.regex.search(line):
                yield number
                end = self._starts[number + 1]
            position = self._lowered.find(fixed, end)

    def body(self, number: int) -> str:
        """A line without the prefix that names its rank."""
        return _RANK.sub("", self.lines[number], count=1) if self._prefixed(number) else (
            self.lines[number]
        )

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

    def _prefixed(self, number: int) -> bool:
        return _RANK.match(self.lines[number]) is not None


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
