"""A host's run folder as messages, and their way into the folder of the whole run.

    host's folder ── FolderStream ──> FileGrown, FileReplaced ── UnionFolder ──> folder of the run

The folders of a host's own ranks keep their paths. Of files that every host has, host 0's are
those of the run, except that metrics and notes of all hosts are collected; all other files are
below `hosts/<node rank>/`. Standard library only.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tpunb.runs import events
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Event, Figure, Note
from tpunb.runs.protocol import FileGrown, FileReplaced
from tpunb.utils import files, records
from tpunb.utils.files import LineBuffer, Tail

SENT = ("spec.json", "script.py", "notebook.json", "notebook.ipynb", "env.json", "values.json",
        "values.pt", "given")  # fmt: skip
"""Entries of a run folder that exist before the run, and that its hosts need."""
POLL_INTERVAL = 0.25
"""Seconds between two searches for new files."""
OFTEN = 0.5
"""Seconds between two copies of a file that is rewritten all the time (`pulse`)."""
PIECE = 1 << 18
"""The most bytes of one FileGrown."""
MOST_PIECES = 8
"""The most of them of one file in a row: a rank that writes all the time is not the only one."""
MOST = 8_000_000
"""The most bytes of a file that is sent whole. No such file of a run is so large."""
MOST_DESCRIBED = 100_000
"""The most bytes of a description of a failure; a rank's own has fewer."""
_SINGLE = frozenset(["events.jsonl", "metrics.jsonl", "supervisor.log", "chips.json"])
"""Files in the run folder itself that are sent."""
_OWN = frozenset((*SENT, *"run.log result.json requests.jsonl place.json hosts stopping".split()))
"""Entries of a run folder that no host may write."""
_TRACE = re.compile(r"rank-(\d+)\.(?:xplane\.pb|pt\.trace\.json)", re.ASCII)
_GROWING = (".log", ".jsonl", ".txt")
_PULSE = "/pulse"
_WHOLE = (".json", ".png", _PULSE)
_PRINTED, _DESCRIBED = "/stderr.log", "/error.json"


def is_streamed(file: str) -> bool:
    """True if a file is part of the stream. Both ends check this, as a host could send any path.

    Files of ranks are `attempts/<n>/<rank>/<name>`. No part of the path may begin with a dot, as
    '..' and unfinished files do.
    """
    parts = file.split("/")
    return file in _SINGLE or (
        file.isprintable()
        and parts[0] == "attempts"
        and len(parts) == 4
        and not any(not part or part.startswith(".") for part in parts)
        and file.endswith((*_GROWING, *_WHOLE))
    )


def fetched_path(file: str, node_rank: int, ranks: range) -> str | None:
    """The path of a host's file in the folder of the whole run; None if that has one of its own."""
    path = _path_in_run(file, node_rank, ranks)
    own = file.split("/")[0] in _OWN or is_streamed(file)
    return None if own and path == file else path


def _path_in_run(file: str, node_rank: int, ranks: range) -> str:
    parts = file.split("/")
    rank = None
    if parts[0] == "attempts" and len(parts) > 2 and parts[2].isdecimal():
        rank = int(parts[2])
    elif parts[0] == "profile" and (match := _TRACE.fullmatch(parts[-1])):
        rank = int(match[1])
    if rank in ranks if rank is not None else node_rank == 0 and file != "supervisor.log":
        return file
    return f"hosts/{node_rank}/{file}"


class FolderStream:
    """Reads what is new in the files of one host's run folder."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tails: dict[str, Tail] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}
        """Inode, size and time of change of each file that was sent whole."""
        self._whole: list[str] = []
        self._looked = self._copied = float("-inf")

    def read(self, *, last: bool = False) -> Iterator[FileGrown | FileReplaced]:
        """Yield what is new. `last`: nothing more will be written."""
        now = time.monotonic()
        if now - self._looked >= POLL_INTERVAL or last:
            self._looked = now
            self._find()
        for name, tail in list(self._tails.items()):
            left = math.inf if last else MOST_PIECES
            while left > 0 and (data := tail.read(PIECE)):
                left -= 1
                # The reader of these may stop at any time: it begins with the others then.
                self._tails[name] = self._tails.pop(name)
                if name.endswith(_PRINTED):
                    # A rank describes its failure before it prints it, and readers rely on that.
                    yield from self._read_whole(name.removesuffix(_PRINTED) + _DESCRIBED)
                yield FileGrown(name, base64.b64encode(data).decode())
        copy = now - self._copied >= OFTEN or last
        if copy:
            self._copied = now
        for name in self._whole:
            if copy or not name.endswith(_PULSE):
                yield from self._read_whole(name)

    def _find(self) -> None:
        for folder, folders, names in os.walk(self._run.path):
            if folder == str(self._run.path):
                folders[:] = [name for name in folders if name == "attempts"]
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), self._run.path)
                if path in self._tails or path in self._whole or not is_streamed(path):
                    continue
                if name.endswith(_GROWING):
                    self._tails[path] = Tail(self._run.path / path)
                else:
                    self._whole.append(path)

    def _read_whole(self, name: str) -> Iterator[FileReplaced]:
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
            yield FileReplaced(name, base64.b64encode(data).decode())

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


class UnionFolder:
    """Writes what one host sends into the folder of the whole run.

    Times in JSON files are corrected by `ahead`, the seconds by which the host's clock is ahead.
    """

    def __init__(self, run: RunDir, node_rank: int, ranks: range, name: str) -> None:
        self._run = run
        self._node_rank = node_rank
        self._ranks = ranks
        self._name = name
        self.ahead: float | None = None
        """None while it is not known."""
        self._lines: dict[str, LineBuffer] = {}
        """The incomplete last lines of `events.jsonl` and `metrics.jsonl`."""
        self.problem = ""
        """Why something could not be written; '' if everything was."""

    def add(self, change: FileGrown | FileReplaced) -> list[Event]:
        """Write a change; return the events of the host that belong to the whole run.

        Files that a host must not write, and what is not base64, are left out.
        """
        try:
            data = base64.b64decode(change.data, validate=True)
            if not is_streamed(change.file):
                return []
            if change.file == self._run.events.name:
                return [event for line in self._take(change.file, data) for event in self._of(line)]
            self._write(change, data)
        except ValueError:
            return []
        except OSError as error:
            self.problem = self.problem or f"{error.strerror or error} ({change.file})"
        return []

    def _take(self, file: str, data: bytes) -> list[bytes]:
        return self._lines.setdefault(file, LineBuffer(records.MOST)).feed(data)

    def _of(self, line: bytes) -> Iterator[Event]:
        try:
            event = events.from_line(self._corrected(line).decode("utf-8", "replace"))
        except ValueError:  # cut off by a full disk on the host
            return
        if self._node_rank == 0 or isinstance(event, Figure):
            yield event
        elif isinstance(event, Note):
            yield replace(event, text=f"{self._name}: {event.text}")

    def _write(self, change: FileGrown | FileReplaced, data: bytes) -> None:
        if change.file == self._run.metrics.name:
            lines = [self._corrected(line) + b"\n" for line in self._take(change.file, data)]
            files.append_lines(self._run.metrics, b"".join(lines))
            return
        path = self._run.path / _path_in_run(change.file, self._node_rank, self._ranks)
        if not self._run.path.exists():  # the user has deleted it
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if isinstance(change, FileReplaced):
            described = change.file.endswith(_DESCRIBED)
            if described and len(data) > MOST_DESCRIBED:  # it becomes part of the result
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            files.atomic_write(path, self._corrected(data) if described else data)
            return
        with open(path, "ab", opener=files.opener) as file:
            file.write(data)

    def _corrected(self, line: bytes) -> bytes:
        """A JSON object with its time by this machine's clock; anything else as it is."""
        if not self.ahead:
            return line
        try:
            data = records.parse(line)
        except ValueError:
            return line
        if not isinstance(data, dict) or not records.is_number(data.get("time")):
            return line
        return json.dumps({**data, "time": data["time"] - self.ahead}).encode()
