"""A log in the form that rules use: plain lines with rank and cell, and fast pattern search."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# Patterns for single lines

_DIGITS = re.compile(r"(?P<kept>\\.|\{\d*,?\d*\}|\[\^[^]]*\])|\[(?P<set>[^]]*\d[^]]*)\]|\d")


@dataclass(frozen=True)
class LinePattern:
    """A case-insensitive regular expression for single lines."""

    source: str
    regex: re.Pattern[str]
    loose: re.Pattern[str]
    """Matches, within a text, the same lines and those that differ from them in digits only."""

    @classmethod
    def compile(cls, source: str) -> LinePattern:
        """Raises re.error if the source is invalid."""
        regex = compile_pattern(source)
        loose = re.compile(_DIGITS.sub(_any_digit, source), re.IGNORECASE | re.MULTILINE)
        return cls(source, regex, loose)


def compile_pattern(source: str) -> re.Pattern[str]:
    """Raises re.error if the source is invalid."""
    return re.compile(source, re.IGNORECASE)


def _any_digit(match: re.Match[str]) -> str:
    if match["kept"]:
        return match[0]
    return rf"[\d{match['set']}]" if match["set"] else r"\d"


# The metrics report of torch_xla (`met.metrics_report()`)

_METRIC = re.compile(r"Metric: (\w+)")
_SAMPLES = re.compile(r"TotalSamples: (\d+)")
_ACCUMULATOR = re.compile(r"Accumulator: ([\w.]+)")
_TIME = re.compile(r"([\d.]+)(d|h|ms|us|ns|m|s)")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_COMPILES = ("CompileTime", "XrtCompile")
_EXECUTIONS = ("ExecuteTime", "XrtExecute", "ExecuteReplicatedTime", "ExecuteComputation")


@dataclass(frozen=True)
class MetricsReport:
    """Numbers of compilations and executions, and the time for compiling; 0 if unknown."""

    compiles: int = 0
    executions: int = 0
    compile_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Compilations per execution."""
        return self.compiles / self.executions if self.executions else 0.0

    @classmethod
    def from_lines(cls, lines: Sequence[str]) -> MetricsReport:
        """Read the last value of each metric, under its names in XRT and in PJRT releases."""
        counts: dict[str, int] = {}
        seconds: dict[str, float] = {}
        name = None
        for line in lines:
            # Most lines are not part of a report, and `in` is cheaper than a pattern.
            if "Metric: " in line and (match := _METRIC.search(line)):
                name = match[1]
            elif name and "TotalSamples: " in line and (match := _SAMPLES.search(line)):
                counts[name] = int(match[1])
            elif name and "Accumulator: " in line and (match := _ACCUMULATOR.search(line)):
                parts = _TIME.findall(match[1])
                seconds[name] = sum(float(number) * _SECONDS[unit] for number, unit in parts)
                name = None
        return cls(
            max((counts.get(metric, 0) for metric in _COMPILES), default=0),
            max((counts.get(metric, 0) for metric in _EXECUTIONS), default=0),
            max((seconds.get(metric, 0.0) for metric in _COMPILES), default=0.0),
        )


# The log

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B])")
_RANK = re.compile(
    r"\[(?:rank|default|\w+:)?\s?(\d{1,4})(?: err)?\][:\s]\s?|\(?rank[ =]?(\d{1,4})\)?: "
)
_DEVICE = re.compile(r"Exception in device=(?:TPU|XLA|CPU):(\d+)|-- Process (\d+) terminated", re.I)
_CELL = re.compile(r"(?:\bcell \[|Cell In ?\[|<ipython-input-|File In \[)(\d+)")
_PIECE = 2000
"""Longer lines are cut into pieces of at most this many characters."""
_SHAPE = bytes(ord("0") if chr(c).isdigit() else ord(chr(c).lower()) for c in range(128)) + bytes(
    range(128, 256)
)
"""Lower case for ASCII letters, 0 for every digit."""
_CELL_DISTANCE = 40
"""Number of lines above a match that are searched for the cell of its traceback."""


class LogLines:
    """Some lines of a log, in which patterns are searched."""

    def __init__(self, log: Log, shapes: Sequence[Sequence[int]]) -> None:
        """`shapes`: the lines, those of one shape together."""
        self._log, self._shapes = log, shapes
        bodies = [log.body(alike[0]) for alike in shapes]
        self._text = "\n".join(bodies)
        self._starts = list(itertools.accumulate((len(body) + 1 for body in bodies), initial=0))

    def find(self, pattern: LinePattern) -> list[int]:
        """The numbers of the lines that match, in order."""
        found: list[int] = []
        match = pattern.loose.search(self._text)
        while match is not None:
            # It may extend to the next line, or differ in digits: each line is tried by itself.
            at = min(bisect.bisect_right(self._starts, match.start()), len(self._shapes)) - 1
            found += [n for n in self._shapes[at] if pattern.regex.search(self._log.body(n))]
            if at + 1 == len(self._shapes):
                break
            match = pattern.loose.search(self._text, self._starts[at + 1])
        return sorted(found)


class Log:
    """The lines of a log, without colours, with carriage returns as line ends.

    Lines that differ only in digits ("step 17, loss 0.25") have the same shape. Patterns are tried
    once for each shape, of which a long log has few.
    """

    def __init__(self, text: str) -> None:
        self.lines = _pieces(_plain(_unpacked(text)).split("\n"))
        shapes: dict[bytes, list[int]] = {}
        lowered = "\n".join(self.lines).encode("utf-8", "surrogatepass").translate(_SHAPE)
        for number, shape in enumerate(lowered.split(b"\n")):
            shapes.setdefault(shape, []).append(number)
        self.shapes: list[list[int]] = list(shapes.values())
        """The lines of each shape, in order of the shapes' first lines."""
        self._found: dict[str, list[int]] = {}
        self._bodies: dict[int, str] = {}

    @cached_property
    def report(self) -> MetricsReport:
        """The numbers of the last metrics report in the log."""
        return MetricsReport.from_lines(self.lines)

    def find(self, pattern: LinePattern) -> list[int]:
        """The numbers of the lines that match, in order."""
        if pattern.source not in self._found:
            self._found[pattern.source] = self.all.find(pattern)
        return self._found[pattern.source]

    @cached_property
    def all(self) -> LogLines:
        return LogLines(self, self.shapes)

    def alike(self, number: int) -> int:
        """The first line of the same shape."""
        return self._firsts[number]

    @cached_property
    def _firsts(self) -> list[int]:
        firsts = [0] * len(self.lines)
        for numbers in self.shapes:
            for number in numbers:
                firsts[number] = numbers[0]
        return firsts

    @cached_property
    def last(self) -> int | None:
        numbers = range(len(self.lines) - 1, -1, -1)
        return next((number for number in numbers if self.lines[number].strip()), None)

    def body(self, number: int) -> str:
        """A line without its rank prefix."""
        body = self._bodies.get(number)
        if body is None:
            line = self.lines[number]
            match = _RANK.match(line)
            body = self._bodies[number] = line[match.end() :] if match else line
        return body

    def rank(self, number: int) -> int | None:
        """The rank that wrote a line, if the line names it."""
        match = _RANK.match(self.lines[number]) or _DEVICE.search(self.lines[number])
        return int(next(group for group in match.groups() if group)) if match else None

    def writer(self, number: int) -> int | None:
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
