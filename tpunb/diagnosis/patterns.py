"""Patterns over one line of a log, with the fixed text that makes looking for them cheap."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_SHORTEST = 4
"""A pattern must have fixed text of this length, or every line of a log would be tried."""
_CLASSES = set("dDwWsSbBAZ0123456789")
_REPEAT = re.compile(r"\{\d*,?\d*\}")


class PatternError(ValueError):
    """A pattern that cannot be used, and why."""


@dataclass(frozen=True)
class LinePattern:
    """A regular expression, upper and lower case alike, that is tried on single lines."""

    source: str
    regex: re.Pattern[str]
    fixed: tuple[str, ...]
    """In lower case: a line that matches holds at least one of these."""
    digits: bool
    """True if it may tell apart lines that differ in digits only."""

    @classmethod
    def of(cls, source: str) -> LinePattern:
        """Compile a pattern; PatternError if it is wrong or has too little fixed text."""
        try:
            regex = re.compile(source, re.IGNORECASE)
        except re.error as error:
            raise PatternError(f"{source!r} is not a regular expression: {error}") from error
        fixed = _fixed(source)
        if min(map(len, fixed)) < _SHORTEST:
            raise PatternError(
                f"{source!r} needs {_SHORTEST} fixed characters in a row, in each alternative"
            )
        return cls(source, regex, tuple(sorted({text.lower() for text in fixed})), _digits(source))


def _digits(source: str) -> bool:
    """True if the pattern names a digit, other than in how often something may come."""
    return any(char.isdigit() for char in _REPEAT.sub("", source))


def _fixed(source: str) -> tuple[str, ...]:
    """Texts of which a match holds at least one; an empty one where nothing is certain."""
    return tuple(text for part in _alternatives(source) for text in _best(part))


def _best(tokens: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The piece of a sequence whose shortest text is longest: fixed characters, or a group."""
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
    """('char' | 'group' | 'other' | 'times' | 'or', text); of a group, what is inside."""
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
    """A group that takes up text, or another thing in brackets (a look-ahead, a flag)."""
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
    at += 1  # a bracket in first place stands for itself; a class is never empty
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
