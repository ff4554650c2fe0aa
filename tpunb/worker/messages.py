"""The pipe to the guard: short messages, one JSON object a line, from agent and runner."""

from __future__ import annotations

import json
import os
from typing import Any


class Reporter:
    """Writes messages to the guard. Lines are short, so several writers never mix."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_inheritable(fd, False)

    def tell(self, kind: str, **values: Any) -> None:
        """Send a message; the guard's Supervision has a method `_on_<kind>` for it."""
        os.write(self._fd, (json.dumps({"kind": kind, **values}) + "\n").encode())

    def close(self) -> None:
        """In a rank: the user's code has nothing to say to the guard."""
        os.close(self._fd)
