"""Where checkpoints are, how they are called, and which belong together.

    000007-step-300-3fa2b1c0.pt                      rank 0's state, for all ranks
    000007-step-300-3fa2b1c0.0-rank-1-of-4.pt        rank 1's part of a checkpoint of four

The first number counts the saves of a folder: the newest checkpoint is the one saved last, not
the one with the highest step, so that a training that begins anew is not resumed from an older
one's end. The letters are the same for all ranks of one attempt, and the number behind them
counts its saves with `per_rank`: parts of different saves never count as one checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from tpunb.training.checkpoint_format import END, has_end

_NAME = re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{8})(?:\.(\d+)-rank-(\d+)-of-(\d+))?\.pt")
_TEMPORARY = re.compile(r"\.(.+)\.(\d+)\.\d+\.tmp")
_ABANDONED = 3600.0
"""Seconds after which another machine's temporary file is nobody's."""
_host = re.sub(r"[^\w-]", "-", socket.gethostname())
_numbers = itertools.count()
_writing: set[str] = set()


@dataclass
class Found:
    """A checkpoint as its files' names tell it."""

    step: int
    group: str
    ranks: int | None
    """How many parts it has; None: it is rank 0's, for all."""
    number: int = 0
    """Its place in the order of saves: that of the first part. (Not of the last: with that, a
    checkpoint that waits for a late rank would look older than one that this rank completes
    before it, and be removed as such.)"""
    names: dict[int, str] = field(default_factory=dict)
    """The files that are there, by rank."""

    @property
    def missing(self) -> list[int]:
        """Ranks whose parts are not there."""
        return sorted(set(range(self.ranks or 1)) - set(self.names))


class Place(Protocol):
    """A folder or its like."""

    shown: str
    """For people: a path or a URL."""

    def list(self) -> list[str]:
        """The names in it; none if it does not exist."""

    def write(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file that is there, whole, once the block has ended well."""

    def open(self, name: str) -> IO[bytes]:
        """Raises FileNotFoundError."""

    def tail(self, name: str) -> bytes:
        """The last END bytes, or as many as there are."""

    def remove(self, names: Iterable[str]) -> None:
        """Also of those that somebody else has removed."""

    def at(self, name: str) -> str:
        """The path or URL of a file."""

    def free(self) -> int | None:
        """Bytes that fit, where that is known."""


class Folder:
    """A folder of a file system of this machine."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).expanduser().absolute()
        self.shown = str(self._path)

    def list(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        self._path.mkdir(parents=True, exist_ok=True)
        self._sweep()
        temporary = f".{_host}.{os.getpid()}.{next(_numbers)}.tmp"
        path = self._path / temporary
        _writing.add(temporary)
        try:
            with open(path, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.rename(path, self._path / name)
            self._sync()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            _writing.discard(temporary)

    def _sync(self) -> None:
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sweep(self) -> None:
        """Remove temporary files of processes that ended in the middle of a save."""
        for name in self.list():
            match = _TEMPORARY.fullmatch(name)
            if match is None or name in _writing:
                continue
            with contextlib.suppress(FileNotFoundError):  # another rank was quicker
                old = time.time() - (self._path / name).stat().st_mtime > _ABANDONED
                dead = match[1] == _host and not _alive(int(match[2]))
                if old or dead:
                    (self._path / name).unlink()

    def open(self, name: str) -> IO[bytes]:
        return open(self._path / name, "rb")

    def tail(self, name: str) -> bytes:
        with self.open(name) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - END, 0))
            return file.read()

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)

    def at(self, name: str) -> str:
        return str(self._path / name)

    def free(self) -> int | None:
        try:
            return shutil.disk_usage(self._path).free
        except OSError:
            return None


class Bucket:
    """Anything else that fsspec knows. A file there is whole when its end is there."""

    def __init__(self, system: Any, path: str, shown: str) -> None:
        self._system = system
        self._path = path.rstrip("/")
        self.shown = shown.rstrip("/")

    def list(self) -> list[str]:
        self._system.invalidate_cache(self._path)
        try:
            return [name.rpartition("/")[2] for name in self._system.ls(self._path, detail=False)]
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        self._system.makedirs(self._path, exist_ok=True)
        path = f"{self._path}/{name}"
        try:
            with self._system.open(path, "wb") as file:
                yield file
        except BaseException:
            # Closing the file has made an object of what there was.
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self._system.rm_file(path)
            raise

    def open(self, name: str) -> IO[bytes]:
        local: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            with self._system.open(f"{self._path}/{name}", "rb") as file:
                shutil.copyfileobj(file, local, 1 << 22)
            local.seek(0)
        except BaseException:
            local.close()
            raise
        return local

    def tail(self, name: str) -> bytes:
        tail: bytes = self._system.tail(f"{self._path}/{name}", END)
        return tail

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._path}/{name}")

    def at(self, name: str) -> str:
        return f"{self.shown}/{name}"

    def free(self) -> int | None:
        return None


def place(where: Path | str) -> Place:
    """The folder behind a path, or what fsspec makes of a URL.

    Of a run's folder, the checkpoints in it. Raises ImportError if fsspec lacks a package for
    this URL, ValueError if it does not know it.
    """
    text = os.fspath(where)
    if "://" not in text:
        folder = Path(text).expanduser()
        if (folder / "spec.json").exists():
            return Folder(folder / "checkpoints")
        return Folder(folder)
    from fsspec.core import url_to_fs

    system, path = url_to_fs(text)
    if "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)):
        return Folder(path)
    return Bucket(system, path, text)


def name_of(number: int, step: int, group: str, part: tuple[int, int, int] | None) -> str:
    """The name of a file; `part`: which save with `per_rank`, whose, of how many ranks."""
    rest = "" if part is None else ".{}-rank-{}-of-{}".format(*part)
    return f"{number:06d}-step-{step}-{group}{rest}.pt"


def checkpoints(names: Iterable[str]) -> list[Found]:
    """The checkpoints that files belong to, the newest first; some may lack parts."""
    found: dict[tuple[str, ...], Found] = {}
    for name in sorted(names):  # so the first part comes first
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        number, step, group, save, rank, ranks = match.groups()
        # Rank 0 may save a step twice: each is one of its own.
        key = (step, group, save, ranks) if save else (step, group, number)
        one = found.setdefault(
            key, Found(int(step), group, int(ranks) if ranks else None, int(number))
        )
        one.names[int(rank or 0)] = name
    return sorted(found.values(), key=lambda one: one.number, reverse=True)


def remove_old(place: Place, keep: int, group: str, alone: bool) -> None:
    """Keep the newest checkpoints that look whole, remove what is older than they are.

    Whole is here what was written to its end: the files are not read again. Unless this process
    is `alone`, the newest that is not of its `group` stays as well: the attempt began from it,
    and a rank that is late has yet to load it.
    """
    whole, began = 0, alone
    for one in checkpoints(place.list()):
        counts = False
        if not one.missing and (whole < keep or not began):
            with contextlib.suppress(FileNotFoundError):  # another rank is removing it
                counts = all(has_end(place.tail(name), name) for name in one.names.values())
        needed = counts and not began and one.group != group
        if whole >= keep and not needed:
            place.remove(one.names.values())
        whole += counts
        # All ranks have come to their first save when all parts of one are there.
        began |= needed or (counts and one.ranks is not None)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
