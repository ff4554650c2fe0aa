"""What each rank says of its end, in memory that it shares with the runner.

Memory and not a file: a rank that has no file descriptor left, a full disk and a folder that is
gone say it all the same. A rank that ends without a mark (os._exit, exec, C's exit, a signal) has
not reached the end of the train cell, whatever its exit code.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from enum import IntEnum
from pathlib import Path
from typing import Any

from tpunb.utils.files import write_json

_ROOM = 1 << 18
"""Bytes for each rank. Pages that nobody writes to take no memory."""
_LENGTH = 8
"""Bytes before a description: the mark, and how long the description is."""


class Mark(IntEnum):
    """How far a rank has come."""

    NONE = 0
    FAILED = 1
    """It, or a process that its cell has forked, has raised. It may still be ending."""
    FINISHED = 2
    """Its train cell has ended well."""


class RankMarks:
    """The marks of all ranks of an attempt. Made before they are forked."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, ranks * _ROOM)
        self._ranks = ranks

    def of(self, rank: int) -> RankMark:
        """That of one rank, from 0 on this host."""
        return RankMark(self._memory, rank * _ROOM)

    def any_failed(self) -> bool:
        return any(self.of(rank).read() is Mark.FAILED for rank in range(self._ranks))


class RankMark:
    """One rank's place. The first failure stays."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offset = offset

    def read(self) -> Mark:
        return Mark(self._memory[self._offset])

    def finish(self) -> None:
        """The train cell has ended well in this rank."""
        if self.read() is Mark.NONE:
            self._memory[self._offset] = Mark.FINISHED

    def fail(self, description: dict[str, Any], file: Path) -> None:
        """Leave the description of what ended this rank in its error.json; the first one counts."""
        if self.read() is Mark.FAILED:
            return
        try:
            write_json(file, description)
        except OSError:  # no descriptor left, a limit on files, a full disk: the runner tries
            self._keep(description)
        self._memory[self._offset] = Mark.FAILED

    def _keep(self, description: dict[str, Any]) -> None:
        data = json.dumps(description).encode()
        if len(data) > _ROOM - _LENGTH:
            data = json.dumps({**description, "traceback": "", "message": ""}).encode()
        start = self._offset + _LENGTH
        self._memory[start : start + len(data)] = data
        self._memory[start - 4 : start] = len(data).to_bytes(4, "little")

    def save_description(self, file: Path) -> None:
        """In the runner: write what the rank could not write itself, if there is anything."""
        start = self._offset + _LENGTH
        length = int.from_bytes(self._memory[start - 4 : start], "little")
        if length:
            with contextlib.suppress(OSError):  # then its standard error has it, if anything has
                write_json(file, json.loads(self._memory[start : start + length]))
