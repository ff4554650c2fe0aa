"""A fair lock: runs of one user that want the same chips have them in the order of arrival.

Each process that wants a device draws a number: a small file that it keeps locked as long as it
lives. The lowest number that is locked has the device. When a process dies, however it does, the
operating system releases its lock, so nobody waits for it. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class RunDescription:
    """What those that wait for a run say of it."""

    run: str
    """Its id."""
    cores: str
    since: float
    """When it was ordered, in seconds since the epoch."""


def lock_folder() -> Path:
    """The folder of the numbers: one for all processes of a user, whatever their TMPDIR is.

    Raises OSError if it cannot be made, or is somebody else's: anyone may write to /tmp.
    """
    path = Path(f"/tmp/tpunb-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder that is this user's alone")
    return path


class DeviceLock:
    """A place in the queue for a device, from now until `release`.

    `key` names the device; `description` is what the others are told of its holder.
    """

    def __init__(self, key: str, description: RunDescription, folder: Path | None = None) -> None:
        self._folder = lock_folder() if folder is None else folder
        self._key = key
        with self._exclusive():
            self._number = 1 + max((number for number, _ in self._tickets()), default=0)
            self._path = self._folder / f"{key}.{self._number}"
            self._file = _open(self._path, os.O_CREAT)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.write(json.dumps(asdict(description)))
            self._file.flush()

    def holder(self) -> RunDescription | None:
        """The description of whoever has the device; None if it is ours."""
        with self._exclusive():
            for number, path in sorted(self._tickets()):
                if number < self._number and (description := _read_if_locked(path)) is not None:
                    return description
        return None

    def release(self) -> None:
        """Give the device, or the place in the queue, to the next."""
        with self._exclusive():
            self._path.unlink(missing_ok=True)
            self._file.close()

    def _tickets(self) -> Iterator[tuple[int, Path]]:
        for path in self._folder.glob(f"{self._key}.*"):
            if path.suffix[1:].isdecimal():
                yield int(path.suffix[1:]), path

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Nobody else draws a number or looks at them."""
        with _open(self._folder / f"{self._key}.lock", os.O_CREAT) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _open(path: Path, flags: int = 0) -> IO[str]:
    return open(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600), "r+", encoding="utf-8")


def _read_if_locked(path: Path) -> RunDescription | None:
    """The description in a number that somebody holds; one that nobody holds is removed."""
    with _open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return RunDescription(**json.load(file))
        path.unlink()
    return None
