"""Stores of checkpoints, the names of their files, and which files form a checkpoint.

    000007-step-300-3fa2b1c0.pt                      rank 0's state, for all ranks
    000007-step-300-3fa2b1c0.0-rank-1-of-4.pt        rank 1's part of a checkpoint of four
    000007-step-300-3fa2b1c0.0-shard-1-of-4.pt       the same, of DTensors: any ranks can load it

The first number counts the saves in a folder: the newest checkpoint is the one saved last, not the
one with the highest step, so that a training that starts again from step 0 is not resumed from the
end of an older one. Each rank counts the files that it finds, and ranks save at different times, so
the parts of a checkpoint have different numbers. Rank 0's number decides: only rank 0 takes part in
every save, so only its numbers are in the order of all saves. The hex digits are the same for all
ranks of an attempt, and the number after them counts its saves in parts, so that parts of
different saves never form one checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tpunb.runs import heartbeat
from tpunb.training.checkpoint.format import END, has_end
from tpunb.utils.text import size

_NAME = re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{8})(?:\.(\d+)-(rank|shard)-(\d+)-of-(\d+))?\.pt")
_TEMPORARY = re.compile(r"\.(.+)\.(\d+)\.\d+\.tmp")
_ABANDONED = 3600.0
"""Seconds after which a temporary file of another machine counts as abandoned."""
_host = re.sub(r"[^\w-]", "-", socket.gethostname())
_numbers = itertools.count()
_writing: set[str] = set()


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

    def may_become_whole(self, reached: Mapping[int, int]) -> bool:
        """True if ranks may still add parts. `reached`: the latest save in parts of each rank."""
        save = self.save
        return save is not None and any(reached.get(rank, -1) < save for rank in self.missing)


class LocalStore:
    """A folder on a file system of this machine.

    `write` opens a file that appears, complete, when the block ends without an exception; `tail`
    returns the last END bytes of a file, `describe_free` '' if that is not known.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).expanduser().absolute()
        self.location = str(self._path)

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
                with heartbeat.storing():
                    file.flush()
                    os.fsync(file.fileno())
            with heartbeat.storing():
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
        """Remove temporary files of processes that ended during a save."""
        for name in self.list():
            match = _TEMPORARY.fullmatch(name)
            if match is None or name in _writing:
                continue
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                old = time.time() - (self._path / name).stat().st_mtime > _ABANDONED
                dead = match[1] == _host and not _alive(int(match[2]))
                if old or dead:
                    (self._path / name).unlink()

    def open(self, name: str) -> IO[bytes]:
        # O_NONBLOCK: opening a FIFO would wait for its other end.
        fd = os.open(self._path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(self._path / name))
        return open(fd, "rb")

    def tail(self, name: str) -> bytes:
        with self.open(name) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - END, 0))
            return file.read()

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)

    def path_of(self, name: str) -> str:
        return str(self._path / name)

    def describe_free(self) -> str:
        try:
            disk = os.statvfs(self._path)
        except OSError:
            return ""
        if disk.f_files and not disk.f_favail:
            return "no inode is free, as df -i shows: there are too many files"
        return f"{size(disk.f_bavail * disk.f_frsize)} is free"


class RemoteStore:
    """A folder at a URL that fsspec supports. A file in it is complete if it has the comment."""

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

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        self._system.makedirs(self._path, exist_ok=True)
        path = f"{self._path}/{name}"
        try:
            file = self._system.open(path, "wb")
            try:
                yield file
            finally:
                with heartbeat.storing():  # most of an upload happens in close()
                    file.close()
        except BaseException:
            # Closing the file has stored the part that was written.
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._system.rm_file(path)
            raise

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

    def tail(self, name: str) -> bytes:
        tail: bytes = self._system.tail(f"{self._path}/{name}", END)
        return tail

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


def file_name(number: int, step: int, group: str, part: CheckpointPart | None) -> str:
    """Return the name of a checkpoint file; `part`: None if it is the whole checkpoint."""
    suffix = ""
    if part is not None:
        kind = "shard" if part.sharded else "rank"
        suffix = f".{part.save}-{kind}-{part.rank}-of-{part.ranks}"
    return f"{number:06d}-step-{step}-{group}{suffix}.pt"


def group_files(names: Iterable[str]) -> list[StoredCheckpoint]:
    """Return the checkpoints that the files form, newest first; some may lack parts."""
    checkpoints: dict[tuple[str, ...], StoredCheckpoint] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        number, step, group, save, kind, rank, ranks = match.groups()
        # If rank 0 saves a step twice, these are two checkpoints.
        key = (step, group, save, kind, ranks) if save else (step, group, number)
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

    A checkpoint counts as complete if all its files have their comment; they are not read again.
    Checkpoints of this attempt to which late ranks may still add parts are kept. Unless this
    process is `alone`, the newest checkpoint of another `group` is kept as well: the attempt
    resumed from it, and a late rank may still have to load it.
    """
    whole, began = 0, alone
    checkpoints = group_files(store.list())
    reached: dict[int, int] = {}
    """The latest save in parts of each rank of this attempt."""
    for checkpoint in checkpoints:
        if checkpoint.group == group and checkpoint.save is not None:
            for rank in checkpoint.names:
                reached[rank] = max(reached.get(rank, -1), checkpoint.save)
    for checkpoint in checkpoints:
        if checkpoint.group == group and checkpoint.may_become_whole(reached):
            continue
        counts = False
        if not checkpoint.missing and (whole < keep or not began):
            with contextlib.suppress(FileNotFoundError):  # another rank is removing it
                counts = all(has_end(store.tail(name), name) for name in checkpoint.names.values())
        needed = counts and not began and checkpoint.group != group
        if whole >= keep and not needed:
            store.remove(checkpoint.names.values())
        whole += counts
        # If all parts of a checkpoint exist, all ranks have reached their first save.
        began |= needed or (counts and checkpoint.ranks is not None)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
