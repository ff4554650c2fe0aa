"""What a cell has room for: the first lines as they come, and then the newest, replaced in place.

Whatever a run prints, its cell stays short enough to scroll past, and the notebook small enough
to save, to mail and to show on the web.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

ROOM = 16_000
"""Bytes of the file that the first lines may take …"""
FIRST = 250
"""… and how many there may be."""
NEWEST = 40
"""Lines that are shown once there is no more room …"""
MOST = 8_000
"""… of at most so many bytes."""
LINE = 12
"""Bytes that a line takes in the file beside its text: indentation, quotes, escapes."""
MESSAGE = 120
"""The same of a message that becomes an output of its own."""


class Paper:
    """Writes lines while there is room, and keeps the newest of those that come later."""

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
        """The newest lines, once it is full."""

    @property
    def is_limited(self) -> bool:
        """Whether it gets full at all."""
        return self.room is not None

    @property
    def most_lines(self) -> int:
        """There is no room for more first lines than this."""
        return self._first if self.room else 0

    def say(self, text: str) -> None:
        """Write what must be read."""
        if text:
            self._write(text)

    def add(self, text: str) -> None:
        """Take whole lines."""
        if self.room is None:
            self.say(text)
            return
        head = self._fitting(text)
        self.say(head)
        self.newest.extend(text[len(head) :].split("\n")[:-1])
        while len(self.newest) > 1 and sum(map(len, self.newest)) > MOST:
            self.newest.popleft()

    def _fitting(self, text: str) -> str:
        """The first lines of a text that there is room for; if that is not all, none is left."""
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
