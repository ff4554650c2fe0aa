"""Marks that ranks leave at their end, in memory shared with the runner.

Memory works, unlike a file, when no file descriptor is left, the disk is full or the folder is
gone. A rank that ends without a mark (os._exit, exec, C's exit, a signal) has not reached the end
of the train cell, whatever its exit code.
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
"""Bytes for each rank. Pages that are never written to take no memory."""
_LENGTH = 8
"""Bytes before a description: the mark, and the length of the description."""


class RankEnd(IntEnum):
    """The end of a rank's work."""

    NONE = 0
    FAILED = 1
    """The rank, or a process that its cell has forked, has raised. It may still be ending."""
    FINISHED = 2
    """The train cell has ended well."""


class RankMarks:
    """The marks of all ranks of an attempt. Create it before forking them."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, ranks * _ROOM)
        self._ranks = ranks

    def of(self, rank: int) -> RankMark:
        """The mark of one rank, numbered from 0 on this host."""
        return RankMark(self._memory, rank * _ROOM)

    def any_failed(self) -> bool:
        return any(self.of(rank).read() is RankEnd.FAILED for rank in range(self._ranks))


class RankMark:
    """The mark of one rank. The first failure stays."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offset = offset

    def read(self) -> RankEnd:
        return RankEnd(self._memory[self._offset])

    def finish(self) -> None:
        """Mark that the train cell has ended well in this rank."""
        if self.read() is RankEnd.NONE:
            self._memory[self._offset] = RankEnd.FINISHED

    def fail(self, description: dict[str, Any], file: Path) -> None:
        """Write the description of this rank's failure to its error.json; only the first counts.

        A child process that was not forked may have written it.
        """
        if self.read() is RankEnd.FAILED:
            return
        try:
            if not file.exists():
                write_json(file, description)
        except OSError:  # no descriptor left, a file size limit, a full disk: the runner tries
            self._keep(description)
        self._memory[self._offset] = RankEnd.FAILED

    def _keep(self, description: dict[str, Any]) -> None:
        data = json.dumps(description).encode()
        if len(data) > _ROOM - _LENGTH:
            data = json.dumps({**description, "traceback": "", "message": ""}).encode()
        start = self._offset + _LENGTH
        self._memory[start : start + len(data)] = data
        self._memory[start - 4 : start] = len(data).to_bytes(4, "little")

    def save_description(self, file: Path) -> None:
        """In the runner: write the description that the rank could not write itself, if any."""
        start = self._offset + _LENGTH
        length = int.from_bytes(self._memory[start - 4 : start], "little")
        if length:
            with contextlib.suppress(OSError):  # if it fails, only the rank's stderr may have it
                write_json(file, json.loads(self._memory[start : start + length]))
