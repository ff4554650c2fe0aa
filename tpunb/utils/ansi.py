"""Make whole lines from text in pieces, as a terminal would show them in the end.

A carriage return restarts a line, so only the last state of a progress bar is kept. Nested bars
move the cursor up and down again: the lowest bar is kept. Colours are kept; other control sequences
are removed, because front ends show them as garbage or drop the text after them.
"""

from __future__ import annotations

import re

LONGEST = 2_000
"""The most characters of a line that are shown: longer lines would wrap over half the screen."""
_MOST = 16_000
"""The most characters of a line that are kept; further ones are only counted."""
_MOST_UP = 16
"""The most lines that the cursor is followed upwards; nested bars do not move it further."""

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
"""The end of a piece of text that may be the first half of a cursor move upwards."""


class _Line:
    def __init__(self) -> None:
        self.is_bar = False
        self._kept = ""
        self._beyond = 0
        self._returned = False

    def extend(self, text: str) -> None:
        """Append text without a line end."""
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
    """The lines of a stream, however its text is split into pieces."""

    def __init__(self) -> None:
        self._line = _Line()
        self._half = ""
        self._above = 0
        """The number of lines that the cursor is above the unfinished line."""
        self._over = _Line()
        """The text written on the line of the cursor above the unfinished line."""

    def feed(self, text: str) -> list[str]:
        """Return the lines that `text` completes, clean and cut to `LONGEST`."""
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
        # Most lines need no change, and are not checked one by one.
        elif _CONTROL.search(text) or len(max(whole, key=len, default="")) > LONGEST:
            found += [_finish(line) for line in whole]
        else:
            found += whole
        self._extend(rest)
        return found

    @property
    def is_bar(self) -> bool:
        """True if the unfinished line was overwritten, as progress bars are."""
        return self._line.is_bar

    def unfinished(self) -> str:
        """Return the text after the last line end."""
        return self._line.shown()

    def rest(self) -> list[str]:
        """Return the unfinished line at the end of the stream, unless it is blank."""
        line, self._line = self._line, _Line()
        return [] if line.is_blank() else [line.shown()]

    def _end(self) -> list[str]:
        """End a line; return it if it must be shown."""
        if not self._above:
            line, self._line = self._line, _Line()
            return [line.shown()]
        # The cursor moves down again. Its text above would be a line for each step of a nested
        # bar, so it is shown only if the bar below was erased and no other is visible.
        self._above -= 1
        over, self._over = self._over, _Line()
        self._line.go_to_start()
        if self._above or over.is_blank() or not self._line.is_blank():
            return []
        return [over.shown()]

    def _extend(self, text: str) -> None:
        """Write text without a line end at the cursor."""
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
    """Return a line of `Lines` without its colours."""
    return _COLOUR.sub("", line)


def _finish(line: str) -> str:
    state = line.rstrip("\r").rpartition("\r")[2]
    return _cut(clean(state[:_MOST]), max(0, len(state) - _MOST))


def clean(line: str) -> str:
    """Return a line without control sequences (titles, cursor moves, queries) other than colours.

    A colour that is still active is reset at the end of the line.
    """
    if not _CONTROL.search(line):
        return line
    if _CONTROL.search(strip_ansi(line)):  # not only colours
        line = _SEQUENCE.sub(lambda match: match.group("colour") or "", line)
    # Without a reset, the colour would continue in the lines of other ranks.
    return line + _RESET if "\x1b" in line and not line.endswith(_RESET) else line


def visible(text: str) -> str:
    """Replace control characters with visible symbols, so that they have no effect."""
    return text.translate(_SIGNS)


def _cut(line: str, beyond: int) -> str:
    """Return the line as shown; `beyond` is the number of characters that were not kept."""
    if len(line) <= LONGEST and not beyond:
        return line
    text = strip_ansi(line)
    left_out = max(0, len(text) - LONGEST) + beyond
    if not left_out:
        return line
    return f"{text[:LONGEST]}… (+{left_out:,} characters, whole in run.log)"
