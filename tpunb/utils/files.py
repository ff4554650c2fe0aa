"""Write and follow files that several processes use, so that no process reads half of one.

Standard library only, because the supervisor uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tpunb.utils import owners

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
"""The folder that a new process puts on its path to import this tpunb."""
LONGEST = 1 << 20
"""The most bytes of a line; longer lines, or files without line ends, are read in pieces."""
ROOM = 1 << 16
"""Bytes reserved for a file that must be written even if the disk is full."""
SETTLED = 2.0
"""Seconds without a change after which a file's time tells whether it has changed."""
_libc = ctypes.CDLL(None)


def size_of(folder: Path) -> int:
    """Return the sum of the lengths of all files in a folder, in bytes."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # a rank has just replaced it
                continue
    return total


def version_of(path: Path | str) -> object:
    """Return what is equal as long as a file has not changed; None if there is none.

    Of a file that was written a moment ago it equals nothing: its time may be the next one's too.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if abs(time.time() - status.st_mtime) < SETTLED:
        return object()
    return status.st_mtime_ns, status.st_size, status.st_dev, status.st_ino


def open_file(path: Path | str, flags: int = os.O_RDONLY, *, anyones: bool = False) -> int:
    """Open a regular file of this user or root; return a descriptor.

    No link, FIFO or device is opened, and nothing is waited for. A file that is created is
    accessible to its user only. `anyones`: it may be another user's, as a file that the user has
    named. Raises OSError.
    """
    try:
        # O_NONBLOCK: opening a FIFO would wait for its other end.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    else:
        status = os.fstat(fd)
        is_regular = stat.S_ISREG(status.st_mode)
        if is_regular and (anyones or owners.is_trusted(status)):
            return fd
        os.close(fd)
        if is_regular:
            raise PermissionError(errno.EPERM, "another user's file", str(path))
    raise PermissionError(errno.EPERM, "not a regular file", str(path))


def opener(path: str, flags: int) -> int:
    """Open a file as `open_file` does: the `opener` of Python's `open`."""
    return open_file(path, flags)


def read_text(path: Path | str) -> str:
    """Return the text of a file. Raises OSError."""
    with open(path, encoding="utf-8", opener=opener) as file:
        return file.read()


def read_start(path: Path | str, most: int) -> bytes:
    """Return the first `most` bytes of a file, or all of it. Raises OSError."""
    with open(open_file(path), "rb") as file:
        return file.read(most)


def read_end(path: Path | str, most: int, *, anyones: bool = False) -> bytes:
    """Return the last `most` bytes of a file, or all of it. Raises OSError."""
    with open(open_file(path, anyones=anyones), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def append_text(path: Path, text: str) -> None:
    """Append text with a single write, so that lines of several processes never mix."""
    fd = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, text.encode("utf-8", "replace"))
    finally:
        os.close(fd)


def append_lines(path: Path, lines: bytes) -> int:
    """Append whole lines with a single write; return the number of bytes written.

    It may be less than all if the disk becomes full; the next call then begins a new line. Raises
    OSError if nothing was written.
    """
    fd = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
        return os.write(fd, lines)
    finally:
        os.close(fd)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that it is complete whenever it exists, readable by its user only.

    Blocks that `reserve_blocks` has reserved are used, so that it works even on a full disk.
    """
    temporary = None
    try:
        fd, name = open_file(_room(path), os.O_WRONLY), str(_room(path))
    except FileNotFoundError:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file with `atomic_write`: dataclasses as objects, a line for each entry."""
    data = _fields_of(data) if is_dataclass(data) else data
    if isinstance(data, Mapping):
        lines = (f"{_encode(str(name))}: {_encode(value)}" for name, value in data.items())
        text = "{\n" + ",\n".join(lines) + "\n}"
    else:
        text = _encode(data)
    atomic_write(path, f"{text}\n".encode("utf-8", "replace"))


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


# Much faster than with `asdict`, which copies, and with indentation.
_encode = json.JSONEncoder(default=_fields_of).encode


def reserve_blocks(path: Path, *, appended: bool = False) -> None:
    """Have the file system reserve blocks for a file that must be written later.

    The file is written by `atomic_write`, or `appended` to. Nothing is reserved if the disk is
    already full or the file system does not support it.
    """
    file = path if appended else _room(path)
    try:
        fd = open_file(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError:
        return
    try:
        # os.posix_fallocate would make the file longer; the 1 is FALLOC_FL_KEEP_SIZE.
        _libc.fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(ROOM))
    finally:
        os.close(fd)


def release_blocks(path: Path) -> None:
    """Release the blocks reserved for a file that is not needed."""
    with contextlib.suppress(OSError):  # the folder is gone, or the file system is read-only
        _room(path).unlink()


def _room(path: Path) -> Path:
    return path.with_name(f".{path.name}.room")


class LineBuffer:
    """Splits a stream of bytes into lines, and keeps the last line while it is incomplete.

    With `longest`, longer lines are returned in pieces.
    """

    def __init__(self, longest: int | None = None) -> None:
        self.rest = bytearray()
        """The incomplete last line."""
        self._longest = longest

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without their newlines."""
        first, *more = data.split(b"\n")
        self.rest += first
        lines = []
        if more:
            lines = [bytes(self.rest), *more]
            self.rest = bytearray(lines.pop())
        if self._longest is not None and len(self.rest) > self._longest:
            lines.append(bytes(self.rest))
            self.rest.clear()
        return lines


def read_lines(path: Path, newest: int | None = None) -> Iterator[str]:
    """Yield the lines of a file without their newlines, long ones in pieces. Raises OSError.

    `newest`: read only this many bytes at the end.
    """
    lines = LineBuffer(LONGEST)
    with open(open_file(path), "rb") as file:
        if newest is not None and (begin := os.fstat(file.fileno()).st_size - newest) > 0:
            file.seek(begin)
            file.readline(LONGEST)  # the rest of a line
        while data := file.read(1 << 20):
            for line in lines.feed(data):
                yield line.decode("utf-8", "replace")
    if lines.rest:
        yield lines.rest.decode("utf-8", "replace")


def read_spread(path: Path, most: int, parts: int = 200) -> Iterator[str]:
    """Yield the lines of a file; if it has more than `most` bytes, those of evenly spaced parts.

    The `parts` parts have about `most` bytes together, and include the beginning and the end of
    the file. A line that begins before a part is not in it. Raises OSError.
    """
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
    if size <= most:
        yield from read_lines(path)
        return
    length = most // parts
    with open(open_file(path), "rb") as file:
        for part in range(parts):
            begin = (size - length) * part // (parts - 1)
            file.seek(max(begin - 1, 0))
            if begin:
                file.readline(LONGEST)  # the rest of a line, or the end of the previous one
            while file.tell() < begin + length and (line := file.readline(LONGEST)):
                yield line.rstrip(b"\n").decode("utf-8", "replace")


class Tail:
    """Follows a file that other processes append to: `read` returns the new bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._fd: int | None = None

    def read(self, most: int = 4_000_000) -> bytes:
        """Return the bytes appended since the last call, at most `most`; b'' if there are none.

        It is b'' too while the file does not exist, or is not a regular file.
        """
        if self._fd is None:
            try:
                self._fd = open_file(self.path)
            except (FileNotFoundError, PermissionError):
                return b""
        data = os.pread(self._fd, most, self.offset)
        self.offset += len(data)
        return data

    def skip_to_end(self, kept: int) -> int:
        """Skip all but the last `kept` bytes; return the number of bytes skipped."""
        try:
            before, self.offset = self.offset, max(self.offset, os.stat(self.path).st_size - kept)
        except OSError:
            return 0
        return self.offset - before

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LineTail:
    """Follows a file of lines: `read` returns the new complete lines."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._lines = LineBuffer(LONGEST)
        self._skipped = False

    def read(self) -> list[str]:
        """Return the new lines, a few megabytes at most."""
        while data := self._tail.read():
            if self._skipped:
                data, self._skipped = data.partition(b"\n")[2], False
            if lines := [line for line in self._lines.feed(data) if line]:
                return [line.decode("utf-8", "replace") for line in lines]
        return []

    def skip_to_end(self, kept: int) -> int:
        """Skip to the lines of the last `kept` bytes; return the number of bytes skipped."""
        left_out = self._tail.skip_to_end(kept)
        self._skipped = left_out > 0
        return left_out

    def close(self) -> None:
        self._tail.close()
