"""Sends a node's stream (`runs.stream`) through a log that people read, and that may break off.

Several lines of the stream are packed into one line of the log:

    tpunb~<number from 0>~<base85 of zlib of the lines>~

A log that is replayed from its start repeats them; their numbers show which are known already. The
rest of the log is for people. The marks survive wherever the log splits or joins lines. Imports
the standard library only.
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
"""Least seconds between two packed lines."""
SELDOM = 15.0
"""Least seconds between two copies of files that change all the time (`pulse`)."""
MOST = 1 << 20
"""Bytes of waiting lines after which they are packed at once."""
_MARKED = re.compile(r"tpunb~(\d+)~([!#-&(-+\--.0-9;-Z^-}]*)(?<!tpunb)~")
_BEGINS = "tpunb~"


class Packer:
    """Packs lines: `add` takes them, `due` returns what to write into the log now."""

    def __init__(self) -> None:
        self._number = self._count = 0
        self._waiting: dict[object, bytes] = {}
        """Encoded lines in order; keyed by file for lines that replace earlier ones."""
        self._size = 0
        self._written = float("-inf")
        self._pulses = float("-inf")

    def add(self, line: Line) -> None:
        """Add a line. A line that replaces a file drops the waiting one of the same file."""
        data = encode(line)
        self._count += 1
        key: object = self._count
        if isinstance(line, Replace):
            key = line.file
            self._waiting.pop(key, None)
        self._waiting[key] = data
        self._size += len(data)

    def due(self, *, last: bool = False) -> str:
        """The packed line to write now, with its newline; '' if nothing is due."""
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
        # '~' is a digit of base85, and '.' is not.
        text = f"{_BEGINS}{self._number}~{packed.replace('~', '.')}~\n"
        self._number += 1
        return text


class Unpacker:
    """Unpacks the lines from a log that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._rest = ""
        self._next = 0
        self.missing = 0
        """Number of packs that were lost: later ones have arrived."""

    @property
    def begun(self) -> bool:
        """True if a pack has arrived."""
        return self._next > 0

    def again(self) -> None:
        """Expect the log from its start."""
        self._rest = ""

    def feed(self, text: str) -> Iterator[Line]:
        """Yield the new lines that a piece of the log completes."""
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
                continue  # damaged: counts as missing
            self.missing += number - self._next
            self._next = number + 1
            for line in lines:
                with contextlib.suppress(ValueError):  # from another version
                    yield decode(line)
        begins = self._rest.rfind(_BEGINS)
        # Text that cannot be the beginning of a pack is for people.
        self._rest = self._rest[begins:] if begins >= 0 else self._rest[-len(_BEGINS) :]


def shown(line: Line, log: str) -> str:
    """The text of a line of the run's log, for people; '' for other lines."""
    if isinstance(line, Append) and line.file == log:
        return line.data.decode("utf-8", "replace")
    return ""
