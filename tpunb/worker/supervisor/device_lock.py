"""A fair lock: runs of one user that need the same chips get them in order of arrival.

Each process that needs a device takes a ticket: a small numbered file that it keeps locked as long
as it lives. The lowest locked number has the device. When a process dies, for whatever reason, the
operating system releases its lock, so no process waits for a dead one.

One more file is locked for the moment in which tickets are taken and read. A process that is
stopped (SIGSTOP) in this moment keeps it, so nothing waits for that lock longer than `PATIENCE`.
Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tpunb.utils import records

PATIENCE = 0.1
"""Seconds to wait for other processes that take or read tickets, which takes them milliseconds."""


@dataclass(frozen=True)
class RunDescription:
    """The description of a run that is shown by the runs waiting for it."""

    run: str
    """The run's id."""
    cores: str
    since: float
    """When the run was ordered, in seconds since the epoch."""


def lock_folder() -> Path:
    """Create the folder of the tickets: one for all processes of a user, whatever their TMPDIR.

    Raises OSError if it cannot be made, or belongs to another user: anyone may write to /tmp.
    """
    path = Path(f"/tmp/tpunb-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder that belongs to this user alone")
    return path


class DeviceLock:
    """A place in the queue for a device, from now until `release`.

    `key` names the device; `description` is shown by the runs that wait for this one. If another
    process keeps the tickets locked, the place is taken by a later `holder`.
    """

    def __init__(self, key: str, description: RunDescription, folder: Path | None = None) -> None:
        """Take a ticket. Raises OSError if it cannot be written."""
        self._folder = lock_folder() if folder is None else folder
        self._key = key
        self._description = description
        self._ticket: _Ticket | None = None
        with contextlib.suppress(BlockingIOError):
            self._take_ticket()

    @property
    def path(self) -> Path:
        """The file that is locked while tickets are taken and read."""
        return self._folder / f"{self._key}.lock"

    def _take_ticket(self) -> _Ticket:
        with self._exclusive():
            number = 1 + max((number for number, _ in self._tickets()), default=0)
            path = self._folder / f"{self._key}.{number}"
            file = _open(path, os.O_CREAT)
            self._ticket = _Ticket(number, path, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(json.dumps(asdict(self._description)))
            file.flush()
        return self._ticket

    def holder(self) -> RunDescription | None:
        """The description of the run that has the device; None if it is this one.

        If the tickets were deleted (a cleaner of /tmp), runs no longer wait for each other. Raises
        BlockingIOError if another process keeps the tickets locked: call it again later.
        """
        with contextlib.suppress(FileNotFoundError):
            ticket = self._ticket or self._take_ticket()
            with self._exclusive():
                for number, path in sorted(self._tickets()):
                    if number < ticket.number and (found := _read_if_locked(path)) is not None:
                        return found
        return None

    def release(self) -> None:
        """Give up the device, or the place in the queue."""
        if self._ticket is not None:
            # A ticket that stays behind is no longer locked: the next process removes it.
            with self._ticket.file, contextlib.suppress(OSError), self._exclusive():
                self._ticket.path.unlink(missing_ok=True)

    def _tickets(self) -> Iterator[tuple[int, Path]]:
        for path in self._folder.glob(f"{self._key}.*"):
            if path.suffix[1:].isdecimal():
                yield int(path.suffix[1:]), path

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other processes from taking or reading tickets. Raises BlockingIOError."""
        with _open(self.path, os.O_CREAT) as file:
            deadline = time.monotonic() + PATIENCE
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise
                time.sleep(0.002)
            yield


@dataclass(frozen=True)
class _Ticket:
    number: int
    path: Path
    file: IO[str]
    """Locked as long as the ticket is valid."""


def _open(path: Path, flags: int = 0) -> IO[str]:
    return open(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600), "r+", encoding="utf-8")


def _read_if_locked(path: Path) -> RunDescription | None:
    """The description in a locked ticket; None, and the ticket is removed, if it is not locked."""
    with _open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return records.build(RunDescription, records.parse(file.read()))
            except ValueError:  # cut off by a full disk, or written by another version
                since = os.fstat(file.fileno()).st_mtime
                return RunDescription("without a description", f"it keeps {path} locked", since)
        path.unlink()
    return None
