"""Whole lines out of text that comes in pieces, as a terminal would leave them on the screen.

A carriage return starts a line again, so of a progress bar only the last state counts. Nested
bars move up and come back down: the lowest one is followed. Colours stay; everything else
that steers a terminal goes, because front ends show it as rubbish or drop what follows it.
"""

from __future__ import annotations

import re

LONGEST = 2_000
"""Characters of a line that are shown: a front end wraps longer ones over half the screen."""
_MOST = 16_000
"""Characters of a line that are looked at. What is beyond is only counted."""
_MOST_UP = 16
"""Lines that are followed upwards. More is no nest of bars."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SIGNS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_SIGNS |= dict.fromkeys(range(127, 160), 65533)
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_RESET = "\x1b[0m"
_SEQUENCE = re.compile(
    r"(?P<colour>\x1b\[[\d;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*(?:[@-~]|\Z)"  # cursor moves, erasing
    r"|\x1b[]PX^_](?:[^\x07\x1b]|\x1b(?!\\))*(?:\x07|\x1b\\|\Z)"  # links, titles
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]+|\x1b"
)
_UP = re.compile(r"\x1b\[(\d{0,4})A")
_HALF = re.compile(r"\x1b(\[\d{0,4})?\Z")
"""The end of a piece of text that may be the first half of a move upwards."""


class _Line:
    """One line while it is written."""

    def __init__(self) -> None:
        self.is_bar = False
        self._kept = ""
        self._beyond = 0
        self._returned = False

    def extend(self, text: str) -> None:
        """Go on with text that holds no line end."""
        if not text:
            return
        state = text.rstrip("\r")
        if state:
            _, returned, state = state.rpartition("\r")
            if self._returned or returned:
                self._kept, self._beyond = "", 0
            room = _MOST - len(self._kept)
            self._kept += state[:room]
            self._beyond += max(0, len(state) - room)
        self.is_bar = self.is_bar or "\r" in text
        self._returned = text.endswith("\r")

    def go_to_start(self) -> None:
        self._returned = True

    def shown(self) -> str:
        return _cut(clean(self._kept), self._beyond)

    def is_blank(self) -> bool:
        return not strip_ansi(self.shown()).strip()


class Lines:
    """The lines of one stream. How its text is split into pieces makes no difference."""

    def __init__(self) -> None:
        self._line = _Line()
        self._half = ""
        self._above = 0
        """How many lines above the unfinished one the text goes to now …"""
        self._over = _Line()
        """… and what was written there."""

    def feed(self, text: str) -> list[str]:
        """The lines that `text` ends, clean and cut to `LONGEST`."""
        text = self._half + text
        self._half = ""
        if (last := text.rfind("\x1b")) >= 0 and _HALF.match(text, last):
            text, self._half = text[:last], text[last:]
        first, *whole = text.split("\n")
        self._extend(first)
        if not whole:
            return []
        moves = self._above > 0 or _UP.search(text)
        found = self._end()
        rest = whole.pop()
        if moves:
            for line in whole:
                self._extend(line)
                found += self._end()
        # Most lines need nothing, and are not looked at one by one.
        elif _CONTROL.search(text) or len(max(whole, key=len, default="")) > LONGEST:
            found += [_finish(line) for line in whole]
        else:
            found += whole
        self._extend(rest)
        return found

    @property
    def is_bar(self) -> bool:
        """Whether the unfinished line was written over: it is a progress bar."""
        return self._line.is_bar

    def unfinished(self) -> str:
        """What stands after the last line end."""
        return self._line.shown()

    def rest(self) -> list[str]:
        """The unfinished line, if there is anything to see in it: no more text will come."""
        line, self._line = self._line, _Line()
        return [] if line.is_blank() else [line.shown()]

    def _end(self) -> list[str]:
        """The line that ends here, if it is one to show."""
        if not self._above:
            line, self._line = self._line, _Line()
            return [line.shown()]
        # The cursor comes down again. What it wrote above would be a line for each step of a
        # nested bar: it is one only when the bar below was wiped out, so that no other shows.
        self._above -= 1
        over, self._over = self._over, _Line()
        self._line.go_to_start()
        if self._above or over.is_blank() or not self._line.is_blank():
            return []
        return [over.shown()]

    def _extend(self, text: str) -> None:
        """Write text that holds no line end, where the cursor is."""
        if "\x1b[" in text:
            end = 0
            for match in _UP.finditer(text):
                self._write(text[end : match.start()])
                end = match.end()
                self._above = min(_MOST_UP, self._above + max(1, int(match.group(1) or 1)))
                self._over = _Line()
            text = text[end:]
        self._write(text)

    def _write(self, text: str) -> None:
        (self._over if self._above else self._line).extend(text)


def strip_ansi(line: str) -> str:
    """A line of `Lines` without its colours."""
    return _COLOUR.sub("", line)


def _finish(line: str) -> str:
    state = line.rstrip("\r").rpartition("\r")[2]
    return _cut(clean(state[:_MOST]), max(0, len(state) - _MOST))


def clean(line: str) -> str:
    """A line without what steers a terminal (its title, its cursor, questions to it); colours stay.

    What is left open ends with the line.
    """
    if not _CONTROL.search(line):
        return line
    if _CONTROL.search(strip_ansi(line)):  # not only colours
        line = _SEQUENCE.sub(lambda match: match.group("colour") or "", line)
    # A colour that is not ended would go on in the lines of other ranks.
    return line + _RESET if "\x1b" in line and not line.endswith(_RESET) else line


def visible(text: str) -> str:
    """A text with signs for control characters, so that it only looks odd where they would act."""
    return text.translate(_SIGNS)


def _cut(line: str, beyond: int) -> str:
    """The line as it is shown; `beyond` counts characters that are not even in it."""
    if len(line) <= LONGEST and not beyond:
        return line
    text = strip_ansi(line)
    left_out = max(0, len(text) - LONGEST) + beyond
    if not left_out:
        return line
    return f"{text[:LONGEST]}… (+{left_out:,} characters, whole in run.log)"
