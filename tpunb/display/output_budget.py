"""Limits a cell's output: the first lines as they come, then the newest, replaced in place.

However much a run prints, its cell stays short enough to scroll past, and the notebook small
enough to save, mail and show on the web.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

ROOM = 16_000
"""Bytes of the notebook file that the first lines may take."""
FIRST = 250
"""Maximum number of first lines."""
NEWEST = 40
"""Number of newest lines that are shown once the budget is spent."""
MOST = 8_000
"""Maximum bytes of the newest lines together."""
LINE = 12
"""Bytes that a line takes in the file in addition to its text: indentation, quotes, escapes."""
MESSAGE = 120
"""Bytes that a message takes in addition to its lines if it becomes an output of its own."""


class OutputBudget:
    """Writes lines while there is room, then keeps the newest ones."""

    def __init__(
        self, write: Callable[[str], None], *, room: int | None = None, message: int = 0
    ) -> None:
        """`room`: bytes, None for no limit. `message`: bytes of each text besides its lines."""
        self._write = write
        self.room = room
        """Bytes left for the first lines."""
        self._message = message
        self._first = FIRST
        """Number of first lines that may still be written."""
        self.newest: deque[str] = deque(maxlen=NEWEST)
        """The newest lines, once the budget is spent."""

    @property
    def is_limited(self) -> bool:
        return self.room is not None

    @property
    def most_lines(self) -> int:
        """Maximum number of first lines that may still be written."""
        return self._first if self.room else 0

    def write_always(self, text: str) -> None:
        """Write important text, even if no room is left."""
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
        """Return the first lines of a text that fit; unless all fit, the budget is spent."""
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
