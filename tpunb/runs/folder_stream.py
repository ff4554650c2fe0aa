"""Turn a run folder into the lines of a stream (`tpunb.runs.stream`): appended and new data.

Only the folder is read, so a stream can begin at any time and any offsets. Standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpunb.runs.directory import RunDir
from tpunb.runs.stream import (
    FOLDERS,
    GROWING,
    MERGED,
    RESULT,
    Append,
    Replace,
    is_streamed,
)
from tpunb.utils import files
from tpunb.utils.files import Tail

POLL_INTERVAL = 0.25
"""Seconds between two searches for new files."""
OFTEN = 0.5
"""Seconds between two copies of a file that is rewritten all the time (`pulse`)."""
PIECE = 1 << 18
"""The most bytes of one `Append`, except for a single longer line."""
MOST = 8_000_000
"""The most bytes of a file that is sent whole. No such file of a run is so large."""
_PULSE = "pulse"
_PRINTED, _DESCRIBED = "/stderr.log", "/error.json"


class FolderStream:
    """Reads the files of one host's run folder from given offsets on."""

    def __init__(self, run: RunDir, since: Mapping[str, int] | None = None) -> None:
        """`since`: the number of bytes already known of each file."""
        self._run = run
        self._since = dict(since or {})
        self._tails: dict[str, Tail] = {}
        self._rests: dict[str, bytes] = {}
        """The incomplete last line of each merged file."""
        self._seen: dict[str, tuple[int, int, int]] = {}
        """Inode, size and time of change of each file that was sent whole."""
        self._whole: list[str] = []
        self._looked = self._copied = float("-inf")

    def read(self, *, last: bool = False) -> Iterator[Append | Replace]:
        """Yield the new data, `result.json` after everything else.

        `last`: nothing more will be written, so incomplete lines are sent as well.
        """
        now = time.monotonic()
        if now - self._looked >= POLL_INTERVAL or last:
            self._looked = now
            self._find()
        for name, tail in self._tails.items():
            for line in self._read_tail(name, tail, last=last):
                if name.endswith(_PRINTED):
                    # A rank describes its failure before it prints it, and readers rely on that.
                    yield from self._read_whole(name.removesuffix(_PRINTED) + _DESCRIBED)
                yield line
        copy = now - self._copied >= OFTEN or last
        if copy:
            self._copied = now
        for name in self._whole:
            if name != RESULT and (copy or not name.endswith(_PULSE)):
                yield from self._read_whole(name)
        if RESULT in self._whole:
            yield from self._read_whole(RESULT)

    def _find(self) -> None:
        for folder, folders, names in os.walk(self._run.path):
            if folder == str(self._run.path):
                folders[:] = [name for name in folders if name in FOLDERS]
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), self._run.path)
                if path in self._tails or path in self._whole or not is_streamed(path):
                    continue
                if name.endswith(GROWING):
                    self._tails[path] = tail = Tail(self._run.path / path)
                    tail.offset = self._since.get(path, 0)
                else:
                    self._whole.append(path)

    def _read_tail(self, name: str, tail: Tail, *, last: bool) -> Iterator[Append]:
        while data := tail.read(PIECE):
            now = time.time()
            at = tail.offset - len(data)
            if name in MERGED:
                data = self._rests.pop(name, b"") + data
                at = tail.offset - len(data)
                whole = data.rfind(b"\n") + 1
                if rest := data[whole:]:
                    self._rests[name] = rest
                data = data[:whole]
            if data:
                yield Append(name, at, data, now)
        if last and (rest := self._rests.pop(name, b"")):
            yield Append(name, tail.offset - len(rest), rest + b"\n", time.time())

    def _read_whole(self, name: str) -> Iterator[Replace]:
        path = Path(self._run.path, name)
        try:
            status = os.lstat(path)
            # Memory that a rank shares (`pulse`) changes without a new time.
            key = (status.st_ino, status.st_size, status.st_mtime_ns)
            if name.endswith(_PULSE):
                data = files.read_start(path, MOST)
                key = (hash(data), len(data), 0)
            elif self._seen.get(name) == key:
                return
            else:
                data = files.read_start(path, MOST)
        except OSError:  # it is gone again, or cannot be read
            return
        if self._seen.get(name) != key:
            self._seen[name] = key
            yield Replace(name, data, time.time())

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
