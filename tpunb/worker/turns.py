"""Turns: runs of one user that want the same chips have them one after the other.

Everyone who wants a device draws a number: a small file that it keeps locked for as long as it
lives, and whoever has the lowest of the living ones has the device. The kernel of the machine
takes the lock away when a guard dies, however it does, so nobody waits for the dead. Standard
library only: guards use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def place() -> Path:
    """The folder for it. The same for all processes of a user, whatever their TMPDIR is.

    Raises OSError if it cannot be made, or is somebody else's: anyone may write to /tmp.
    """
    path = Path(f"/tmp/tpunb-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder that is this user's alone")
    return path


class Turn:
    """A place in the queue for a device, from now until `leave`.

    `key` names the device, `who` says to the others who has it or waits for it.
    """

    def __init__(self, key: str, who: dict[str, Any], folder: Path | None = None) -> None:
        self._folder = place() if folder is None else folder
        self._key = key
        with self._alone():
            self._number = 1 + max((number for number, _ in self._tickets()), default=0)
            self._path = self._folder / f"{key}.{self._number}"
            self._file = _open(self._path, os.O_CREAT)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.write(json.dumps(who))
            self._file.flush()

    def holder(self) -> dict[str, Any] | None:
        """Who has the device, as they said of themselves; None if it is ours."""
        with self._alone():
            for number, path in sorted(self._tickets()):
                if number < self._number and (who := _living(path)) is not None:
                    return who
        return None

    def leave(self) -> None:
        """Give the device, or the place in the queue, to the next."""
        with self._alone():
            self._path.unlink(missing_ok=True)
            self._file.close()

    def _tickets(self) -> Iterator[tuple[int, Path]]:
        for path in self._folder.glob(f"{self._key}.*"):
            if path.suffix[1:].isdecimal():
                yield int(path.suffix[1:]), path

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else draws a number or looks at them."""
        with _open(self._folder / f"{self._key}.lock", os.O_CREAT) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _open(path: Path, flags: int = 0) -> IO[str]:
    return open(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600), "r+", encoding="utf-8")


def _living(path: Path) -> dict[str, Any] | None:
    """What stands in a number that somebody holds; one that nobody holds is taken away."""
    with _open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who: dict[str, Any] = json.load(file)
            return who
        path.unlink()
    return None
