"""Stores of checkpoints, the names of their files, and which files form a checkpoint.

    000007-step-300-3fa2b1c0-9bd1f3a7.pt                   rank 0's state, for all ranks
    000007-step-300-3fa2b1c0.0-rank-1-of-4-52c0ab16.pt     rank 1's part of a checkpoint of four
    000007-step-300-3fa2b1c0.0-shard-1-of-4-0e7d1f00.pt    the same, of DTensors: for any ranks

The first number counts the saves in a folder: the newest checkpoint is the one saved last, not the
one with the highest step, so that a training that starts again from step 0 is not resumed from the
end of an older one. Each rank counts the files that it finds, and ranks save at different times, so
the parts of a checkpoint have different numbers. Rank 0's number decides: only rank 0 takes part in
every save, so only its numbers are in the order of all saves. The first hex digits are the same for
all ranks of an attempt, and the number after them counts its saves in parts, so that parts of
different saves never form one checkpoint. The last hex digits are the CRC-32 of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from tpunb.runs import heartbeat
from tpunb.utils.text import size

_NAME = re.compile(
    r"(\d{6,})-step-(\d+)-([0-9a-f]{8})(?:\.(\d+)-(rank|shard)-(\d+)-of-(\d+))?"
    r"-([0-9a-f]{8})\.pt"
)
_ABANDONED = 60.0
"""Seconds after which a temporary file that no process has locked was not created just now."""
_ABANDONED_IN_BUCKET = 3600.0
"""Seconds after which a temporary file in a bucket, which has no locks, is of no save."""


@dataclass
class StoredCheckpoint:
    """A checkpoint, as known from the names of its files."""

    step: int
    group: str
    ranks: int | None
    """The number of its parts; None for a single file, which rank 0 wrote for all ranks."""
    save: int | None = None
    """Its number among the saves in parts of its attempt."""
    sharded: bool = False
    """True if a run with other ranks can put its parts together."""
    numbers: dict[int, int] = field(default_factory=dict)
    """The numbers of the existing files, by rank."""
    names: dict[int, str] = field(default_factory=dict)
    """The names of the existing files, by rank."""

    @property
    def number(self) -> int:
        """Its place in the order of saves: rank 0's number, or the highest if that is missing."""
        return self.numbers[0] if 0 in self.numbers else max(self.numbers.values())

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.ranks or 1)) - set(self.names))


class LocalStore:
    """A folder on a file system of this machine."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).expanduser().absolute()
        self.location = str(self._path)

    def list(self) -> list[str]:
        try:
            names = os.listdir(self._path)  # not os.scandir, which a signal may leave open
        except FileNotFoundError:
            return []
        paths = [self._path / name for name in names]
        return [path.name for path in paths if path.is_symlink() or path.is_file()]

    def write(self, write: Callable[[IO[bytes]], str]) -> None:
        """Add a file, which appears when it is complete. `write` fills it and returns its name."""
        self._path.mkdir(parents=True, exist_ok=True)
        self._sweep()
        path = self._path / f".{uuid.uuid4().hex}.tmp"
        try:
            with open(path, "xb") as file:
                with contextlib.suppress(OSError):  # no file system needs to have locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                name = write(file)
                with heartbeat.storing():
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(path, self._path / name)
                    self._sync()
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _sync(self) -> None:
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sweep(self) -> None:
        """Remove temporary files of saves that were cut short: no process has them locked."""
        left = (name for name in self.list() if name.startswith(".") and name.endswith(".tmp"))
        for path in map(self._path.joinpath, left):
            with contextlib.suppress(OSError):  # it is locked, or another rank has removed it
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    with open(path, "rb") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()

    def open(self, name: str) -> IO[bytes]:
        """Open a file; a link that does not lead to one is empty."""
        path = self._path / name
        # O_NONBLOCK: opening a FIFO would wait for its other end.
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if path.is_symlink():
                return io.BytesIO()
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return io.BytesIO()
        return open(fd, "rb")

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)

    def path_of(self, name: str) -> str:
        return str(self._path / name)

    def describe_free(self) -> str:
        """Return how much can still be written; '' if that is not known."""
        try:
            disk = os.statvfs(self._path)
        except OSError:
            return ""
        if disk.f_files and not disk.f_favail:
            return "no inode is free, as df -i shows: there are too many files"
        return f"{size(disk.f_bavail * disk.f_frsize)} is free"


class RemoteStore:
    """A folder at a URL that fsspec supports."""

    def __init__(self, system: Any, path: str, location: str) -> None:
        self._system = system
        self._path = path.rstrip("/")
        self.location = location.rstrip("/")

    def list(self) -> list[str]:
        self._system.invalidate_cache(self._path)
        try:
            return [name.rpartition("/")[2] for name in self._system.ls(self._path, detail=False)]
        except FileNotFoundError:
            return []

    def write(self, write: Callable[[IO[bytes]], str]) -> None:
        self._system.makedirs(self._path, exist_ok=True)
        self._sweep()
        path = f"{self._path}/{uuid.uuid4().hex}.tmp"
        try:
            file = self._system.open(path, "wb")
            try:
                name = write(file)
            finally:
                with heartbeat.storing():  # most of an upload happens in close()
                    file.close()
            with heartbeat.storing():
                self._system.mv(path, f"{self._path}/{name}")
        except BaseException:
            # Closing the file has stored the part that was written.
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._system.rm_file(path)
            raise

    def _sweep(self) -> None:
        """Remove temporary files of saves that were killed: what is not is renamed at once."""
        for name in filter(re.compile(r"[0-9a-f]{32}\.tmp").fullmatch, self.list()):
            path = f"{self._path}/{name}"
            with contextlib.suppress(Exception):  # another rank has removed it, or it has no time
                age = datetime.now(timezone.utc) - self._system.modified(path)
                if age.total_seconds() > _ABANDONED_IN_BUCKET:
                    self._system.rm_file(path)

    def open(self, name: str) -> IO[bytes]:
        local: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            with heartbeat.storing(), self._system.open(f"{self._path}/{name}", "rb") as file:
                shutil.copyfileobj(file, local, 1 << 22)
            local.seek(0)
        except BaseException:
            local.close()
            raise
        return local

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._path}/{name}")

    def path_of(self, name: str) -> str:
        return f"{self.location}/{name}"

    def describe_free(self) -> str:
        return ""


Store = LocalStore | RemoteStore


def open_store(path: Path | str) -> Store:
    """Return the store at a path or at a URL that fsspec supports.

    For a run's folder it is the folder of its checkpoints. Raises ImportError if fsspec lacks a
    package for this URL, ValueError if it does not know the protocol.
    """
    text = os.fspath(path)
    if "://" not in text:
        folder = Path(text).expanduser()
        if (folder / "spec.json").exists():
            return LocalStore(folder / "checkpoints")
        return LocalStore(folder)
    from fsspec.core import url_to_fs

    system, folder_path = url_to_fs(text)
    if "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)):
        return LocalStore(folder_path)
    return RemoteStore(system, folder_path, text)


@dataclass(frozen=True)
class CheckpointPart:
    """Which part of a checkpoint a file is."""

    save: int
    """The number of the save in parts."""
    sharded: bool
    rank: int
    ranks: int


def file_name(number: int, step: int, group: str, part: CheckpointPart | None, crc: int) -> str:
    """Return the name of a checkpoint file; `part`: None if it is the whole checkpoint."""
    suffix = ""
    if part is not None:
        kind = "shard" if part.sharded else "rank"
        suffix = f".{part.save}-{kind}-{part.rank}-of-{part.ranks}"
    return f"{number:06d}-step-{step}-{group}{suffix}-{crc:08x}.pt"


def crc_in(name: str) -> int:
    """Return the CRC-32 in the name of a checkpoint file."""
    return int(name[-11:-3], 16)


def group_files(names: Iterable[str]) -> list[StoredCheckpoint]:
    """Return the checkpoints that the files form, newest first; some may lack parts."""
    checkpoints: dict[tuple[str, ...], StoredCheckpoint] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        number, step, group, save, kind, rank, ranks, _ = match.groups()
        # If rank 0 saves a step twice, these are two checkpoints.
        key = (step, group, save, kind, ranks) if save else (name,)
        checkpoint = checkpoints.setdefault(
            key,
            StoredCheckpoint(
                int(step),
                group,
                int(ranks) if ranks else None,
                int(save) if save else None,
                kind == "shard",
            ),
        )
        checkpoint.names[int(rank or 0)] = name
        checkpoint.numbers[int(rank or 0)] = int(number)
    return sorted(checkpoints.values(), key=lambda each: each.number, reverse=True)


def next_number(names: Iterable[str]) -> int:
    """Return the number of the next file in a folder: one more than the highest."""
    matches = (_NAME.fullmatch(name) for name in names)
    return max((int(match[1]) for match in matches if match is not None), default=0) + 1


def remove_old(store: Store, keep: int, group: str, alone: bool) -> None:
    """Keep the newest `keep` complete checkpoints and remove all older ones.

    Ranks may still add parts to a checkpoint of this attempt, `group`. Unless this process is
    `alone`, the newest checkpoint of another attempt is kept as well: this one resumed from it, and
    a late rank may still have to load it.
    """
    whole, began = 0, alone
    for checkpoint in group_files(store.list()):
        complete = not checkpoint.missing
        if not complete and checkpoint.group == group:
            continue
        resumed = complete and not began and checkpoint.group != group
        if whole >= keep and not resumed:
            store.remove(checkpoint.names.values())
        whole += complete
        # If all parts of a checkpoint exist, all ranks have reached their first save.
        began |= resumed or (complete and checkpoint.ranks is not None)
