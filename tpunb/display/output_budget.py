"""Limits a cell's output: the first lines as they come, then the newest, replaced in place.

Whatever a run prints, its cell stays short enough to scroll past, and the notebook small enough
to save, to mail and to show on the web.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

ROOM = 16_000
"""Bytes of the notebook file that the first lines may take …"""
FIRST = 250
"""… and how many there may be."""
NEWEST = 40
"""Lines that are shown once the budget is spent …"""
MOST = 8_000
"""… of at most this many bytes."""
LINE = 12
"""Bytes that a line takes in the file besides its text: indentation, quotes, escapes."""
MESSAGE = 120
"""The same for a message that becomes an output of its own."""


class OutputBudget:
    """Writes lines while there is room, then keeps the newest ones."""

    def __init__(
        self, write: Callable[[str], None], *, room: int | None = None, message: int = 0
    ) -> None:
        """`room`: bytes, None for no limit. `message`: what each text costs beside its lines."""
        self._write = write
        self.room = room
        """Bytes that are left for the first lines."""
        self._message = message
        self._first = FIRST
        """Lines that may still be written."""
        self.newest: deque[str] = deque(maxlen=NEWEST)
        """The newest lines, once the budget is spent."""

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self.room is not None

    @property
    def most_lines(self) -> int:
        """How many first lines may still be written."""
        return self._first if self.room else 0

    def write_always(self, text: str) -> None:
        """Write text that must be seen, whatever room is left."""
        if text:
            self._write(text)

    def add(self, text: str) -> None:
        """Write whole lines while there is room, keep the newest afterwards."""
        if self.room is None:
            self.write_always(text)
            return
        head = self._fitting(text)
        self.write_always(head)
        self.newest.extend(text[len(head) :].split("\n")[:-1])
        while len(self.newest) > 1 and sum(map(len, self.newest)) > MOST:
            self.newest.popleft()

    def _fitting(self, text: str) -> str:
        """The first lines of a text that fit; if not all do, the budget is spent."""
        if not text or not self.room:
            return ""
        room, end = self.room - self._message, 0
        for line in text.split("\n")[:-1]:
            room -= len(line.encode()) + LINE
            if room < 0 or not self._first:
                self.room = 0
                return text[:end]
            self._first -= 1
            end += len(line) + 1
        self.room = room
        return text
