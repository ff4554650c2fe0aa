"""A log in the form that rules use: plain lines with rank and cell, and fast pattern search."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

# Patterns for single lines, with the fixed text that makes the search cheap

_SHORTEST = 4
"""Consecutive fixed characters that a pattern must have, so that not every line is tried."""
_CLASSES = set("dDwWsSbBAZ0123456789")
_REPEAT = re.compile(r"\{\d*,?\d*\}")


class PatternError(ValueError):
    """A pattern that cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class LinePattern:
    """A case-insensitive regular expression for single lines."""

    source: str
    regex: re.Pattern[str]
    fixed: tuple[str, ...]
    """Each matching line contains at least one of these, in lower case."""
    digits: bool
    """True if it may distinguish lines that differ only in digits."""

    @classmethod
    def compile(cls, source: str) -> LinePattern:
        """Raises PatternError if the source is invalid or has too little fixed text."""
        regex = compile_pattern(source)
        fixed = _fixed(source)
        if min(map(len, fixed)) < _SHORTEST:
            raise PatternError(
                f"{source!r} needs {_SHORTEST} fixed characters in a row in each alternative"
            )
        return cls(source, regex, tuple(sorted({text.lower() for text in fixed})), _digits(source))


def compile_pattern(source: str) -> re.Pattern[str]:
    """Raises PatternError if the source is invalid."""
    try:
        return re.compile(source, re.IGNORECASE)
    except re.error as error:
        raise PatternError(f"{source!r} is not a regular expression: {error}") from error


def _digits(source: str) -> bool:
    """True if the pattern contains a digit, except in a repetition such as {2}."""
    return any(char.isdigit() for char in _REPEAT.sub("", source))


def _fixed(source: str) -> tuple[str, ...]:
    """Texts of which a match contains at least one; an empty text if no text is certain."""
    return tuple(text for part in _alternatives(source) for text in _best(part))


def _best(tokens: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The part of a sequence whose shortest text is longest: fixed characters, or a group."""
    pieces: list[tuple[str, ...]] = []
    run = ""
    for at, (kind, text) in enumerate(tokens):
        optional = (
            at + 1 < len(tokens) and tokens[at + 1][0] == "times" and tokens[at + 1][1] != "+"
        )
        if kind == "char" and not optional:
            run += text
            continue
        pieces.append((run,))
        run = ""
        if kind == "group" and not optional:
            pieces.append(_fixed(text))
    pieces.append((run,))
    return max(pieces, key=lambda texts: (min(map(len, texts)), -len(texts)))


def _tokens(source: str) -> list[tuple[str, str]]:
    """('char' | 'group' | 'other' | 'times' | 'or', text); for a group, the text inside it."""
    tokens = []
    at = 0
    while at < len(source):
        char = source[at]
        kind, text, end = "char", char, at + 1
        if char == "\\":
            kind, text, end = "char", source[at + 1], at + 2
            if text in _CLASSES:
                kind = "other"
        elif char == "[":
            kind, end = "other", _class_end(source, at)
        elif char == "(":
            kind, text, end = _group(source, at)
        elif char in ".^$":
            kind = "other"
        elif char == "|":
            kind = "or"
        elif char in "*?+":
            kind = "times"
        elif match := _REPEAT.match(source, at):
            kind, end = "times", match.end()
        tokens.append((kind, text))
        at = end
    return tokens


def _group(source: str, start: int) -> tuple[str, str, int]:
    """A group that matches text, or another bracketed construct (a look-ahead, a flag)."""
    end = _group_end(source, start)
    if source.startswith("(?:", start):
        return "group", source[start + 3 : end - 1], end
    if source.startswith("(?", start):
        return "other", "", end
    return "group", source[start + 1 : end - 1], end


def _class_end(source: str, start: int) -> int:
    at = start + 1
    if source[at] == "^":
        at += 1
    at += 1  # a bracket in first position is literal: a class is never empty
    while source[at] != "]":
        at += 2 if source[at] == "\\" else 1
    return at + 1


def _group_end(source: str, start: int) -> int:
    depth = 0
    at = start
    while True:
        char = source[at]
        if char == "\\":
            at += 2
            continue
        if char == "[":
            at = _class_end(source, at)
            continue
        depth += (char == "(") - (char == ")")
        at += 1
        if depth == 0:
            return at


def _alternatives(source: str) -> list[list[tuple[str, str]]]:
    parts: list[list[tuple[str, str]]] = [[]]
    for token in _tokens(source):
        if token[0] == "or":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


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


class Log:
    """The lines of a log, without colours, with carriage returns as line ends.

    Lines that differ only in digits ("step 17, loss 0.25") have the same shape. Patterns are tried
    on shapes, of which a long log has few: this makes searching 100,000 lines fast.
    """

    def __init__(self, text: str) -> None:
        self.lines = _pieces(_plain(_unpacked(text)).split("\n"))
        self._found: dict[str, list[int]] = {}
        self._shapes: dict[bytes, list[int]] = {}
        lowered = "\n".join(self.lines).encode("utf-8", "surrogatepass").translate(_SHAPE)
        for number, shape in enumerate(lowered.split(b"\n")):
            self._shapes.setdefault(shape, []).append(number)
        self._numbers = list(self._shapes.values())
        self._haystack = b"\n".join(self._shapes)
        self._starts = [0, *itertools.accumulate(len(shape) + 1 for shape in self._shapes)]

    @cached_property
    def report(self) -> MetricsReport:
        """The numbers of the last metrics report in the log."""
        return MetricsReport.from_lines(self.lines)

    def find(self, pattern: LinePattern) -> list[int]:
        """The numbers of the lines that match, in order."""
        if pattern.source not in self._found:
            # A shape's lines are in order, but shapes are not.
            numbers = {number for shape in self._matches(pattern) for number in shape}
            self._found[pattern.source] = sorted(numbers)
        return self._found[pattern.source]

    def by_shape(self) -> Sequence[Sequence[int]]:
        """The lines of each shape."""
        return self._numbers

    def alike(self, number: int) -> int:
        """The first line of the same shape."""
        return self._firsts[number]

    @cached_property
    def _firsts(self) -> list[int]:
        firsts = [0] * len(self.lines)
        for numbers in self._numbers:
            for number in numbers:
                firsts[number] = numbers[0]
        return firsts

    @cached_property
    def last(self) -> int | None:
        """The last line that is not empty."""
        numbers = range(len(self.lines) - 1, -1, -1)
        return next((number for number in numbers if self.lines[number].strip()), None)

    def _matches(self, pattern: LinePattern) -> Iterator[list[int]]:
        """The numbers of lines that match, shape by shape."""
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
        """A line without its rank prefix."""
        line = self.lines[number]
        match = _RANK.match(line)
        return line[match.end() :] if match else line

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
