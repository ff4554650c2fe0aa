"""A node's stream (`runs.stream`) through a log that people read as well, and that may be cut.

Some lines of it are packed together and written as one line of the log:

    tpunb~<number from 0>~<base85 of zlib of the lines>~

A log that is replayed from its start says them again, and their numbers tell which are known. What
else the log has is for people. Wherever the log breaks lines or joins them, the marks hold.
Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import re
import time
import zlib
from collections.abc import Iterator

from tpunb.runs.stream import Append, Line, Replace, decode, encode

EVERY = 2.0
"""Seconds between two lines of a log, at least."""
SELDOM = 15.0
"""Seconds between two copies of what changes all the time (`pulse`)."""
MOST = 1 << 20
"""Bytes that wait to be packed, at most."""
_MARKED = re.compile(r"tpunb~(\d+)~([!#-&(-+\--.0-9;-Z^-}]*)(?<!tpunb)~")
_BEGINS = "tpunb~"


class Packer:
    """Packs lines; `add` and `due` say what is to be written into the log by now."""

    def __init__(self) -> None:
        self._number = self._count = 0
        self._waiting: dict[object, bytes] = {}
        """By what a later line replaces, in order."""
        self._size = 0
        self._written = float("-inf")
        self._pulses = float("-inf")

    def add(self, line: Line) -> None:
        """Take in a line. Of a file that is written anew only the last state is sent."""
        data = encode(line)
        self._count += 1
        key: object = self._count
        if isinstance(line, Replace):
            key = line.file
            self._waiting.pop(key, None)
        self._waiting[key] = data
        self._size += len(data)

    def due(self, *, last: bool = False) -> str:
        """What to write now, with its newline; '' for nothing yet."""
        now = time.monotonic()
        if not self._waiting or not (last or now - self._written >= EVERY or self._size >= MOST):
            return ""
        sent = dict(self._waiting)
        if not last and now - self._pulses < SELDOM:
            pulses = {key: sent.pop(key) for key in list(sent) if str(key).endswith("/pulse")}
        else:
            pulses, self._pulses = {}, now
        if not sent:
            return ""
        self._waiting, self._size, self._written = pulses, 0, now
        packed = base64.b85encode(zlib.compress(b"".join(sent.values()), 9)).decode()
        # b85 has '~' for one of its digits, and no dot.
        text = f"{_BEGINS}{self._number}~{packed.replace('~', '.')}~\n"
        self._number += 1
        return text


class Unpacker:
    """Finds the lines again in what the log says, in pieces of any size."""

    def __init__(self) -> None:
        self._rest = ""
        self._next = 0
        self.missing = 0
        """How many packs have not come: what is behind them has."""

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return self._next > 0

    def again(self) -> None:
        """The log begins from its start."""
        self._rest = ""

    def feed(self, text: str) -> Iterator[Line]:
        """The lines that a piece of the log completes, and that were not known."""
        self._rest += text.replace("\n", "").replace("\r", "")
        while match := _MARKED.search(self._rest):
            self._rest = self._rest[match.end() :]
            number = int(match[1])
            if number < self._next:
                continue
            try:
                packed = base64.b85decode(match[2].replace(".", "~"))
                lines = zlib.decompress(packed).splitlines()
            except (ValueError, zlib.error):
                continue  # damaged: it counts as missing
            self.missing += number - self._next
            self._next = number + 1
            for line in lines:
                with contextlib.suppress(ValueError):  # not for this version
                    yield decode(line)
        begins = self._rest.rfind(_BEGINS)
        # What cannot be the beginning of a pack is for people.
        self._rest = self._rest[begins:] if begins >= 0 else self._rest[-len(_BEGINS) :]


def shown(line: Line, log: str) -> str:
    """What of a line people read: that of the run's log."""
    if isinstance(line, Append) and line.file == log:
        return line.data.decode("utf-8", "replace")
    return ""
