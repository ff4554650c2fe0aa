"""A run folder as the lines of a stream (`tpunb.runs.stream`): what was appended, what is new.

It reads the folder alone, so it can begin at any time and at any offsets. Standard library only.
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

LOOK = 0.25
"""Seconds between two looks for new files."""
OFTEN = 0.5
"""Seconds between two copies of a file that is written anew all the time (`pulse`)."""
PIECE = 1 << 18
"""Bytes of one `Append`, at most, except for a line that is longer."""
MOST = 8_000_000
"""Bytes of a file that is sent whole. None of a run is so large."""
_PULSE = "pulse"
_PRINTED, _DESCRIBED = "/stderr.log", "/error.json"


class FolderStream:
    """The files of one host's run folder, from offsets on."""

    def __init__(self, run: RunDir, since: Mapping[str, int] | None = None) -> None:
        """`since`: how many bytes of which file are known already."""
        self._run = run
        self._since = dict(since or {})
        self._tails: dict[str, Tail] = {}
        self._rests: dict[str, bytes] = {}
        """Of merged files: the beginning of a line."""
        self._seen: dict[str, tuple[int, int, int]] = {}
        """Of files that are sent whole: what `stat` said of them."""
        self._whole: list[str] = []
        self._looked = self._copied = float("-inf")

    def read(self, *, last: bool = False) -> Iterator[Append | Replace]:
        """What is new. `last`: nothing more will come, so what is half a line is sent as well.

        `result.json` comes after everything else.
        """
        now = time.monotonic()
        if now - self._looked >= LOOK or last:
            self._looked = now
            self._find()
        for name, tail in self._tails.items():
            for line in self._read_tail(name, tail, last=last):
                if name.endswith(_PRINTED):
                    # A rank describes its failure before it prints it: readers rely on that.
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
        except OSError:  # it is gone again, or nobody may read it
            return
        if self._seen.get(name) != key:
            self._seen[name] = key
            yield Replace(name, data, time.time())

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
