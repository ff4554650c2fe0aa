"""A store for the ranks of one machine: memory that they share, to which each of them appends.

torch elastic's TCPStore listens, serves whoever connects, and looks up the name of each address
that it connects to: where no DNS server answers, each rank waits 10 s for that (torch 2.8, 2.9).
The memory is a file without a name: only processes that have inherited it can open it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

from torch._C._distributed_c10d import Store

PAUSE = 0.002
"""Seconds between two looks of a rank that waits for a key."""
_RECORD = struct.Struct("<B16sIII")
"""Kind, mark, and the lengths of key, value and expected value, which follow."""


ROOM = 1 << 28
"""Bytes. Pages that nobody has written to take no memory."""
_BEGIN = 8


class _Kind(IntEnum):
    SET = 0
    ADD = 1
    COMPARE_SET = 2
    DELETE = 3


class Board(Store):
    """A store on the memory file with descriptor `file`, inherited by all ranks.

    Ranks append records, one at a time, and all read them in that order, so they agree on the
    result of each. Readers take no lock: 64 ranks that wait for each other with FileStore, where
    they do, took 42 s. The memory is mapped, not read as a file: the system may give zeros for a
    page that another process is just appending.
    """

    def __init__(self, file: int, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        # Opened again, because locks of one opening do not exclude each other.
        self._file = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        os.truncate(self._file, ROOM)
        self._memory = mmap.mmap(self._file, ROOM)
        self._end = memoryview(self._memory)[:_BEGIN].cast("Q")
        """One number: where the next record begins, relative to the first."""
        self._lock = threading.RLock()
        self._offset = 0
        self._values: dict[str, bytes] = {}
        self._results: dict[bytes, bytes] = {}
        """What this rank's own records have led to, by their mark."""

    def set(self, key: str, value: str | bytes) -> None:
        self._append(_Kind.SET, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key. Waits for it; TimeoutError after the store's time-out."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        return int(self._append(_Kind.ADD, key, str(amount).encode()))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._append(_Kind.COMPARE_SET, key, _bytes(desired), _bytes(expected))

    def delete_key(self, key: str) -> bool:
        return self._append(_Kind.DELETE, key) == b"1"

    def num_keys(self) -> int:
        self._read()
        return len(self._values)

    # By these names torch calls them from C++ (2.8, 2.9).
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def check(self, keys: Sequence[str]) -> bool:
        self._read()
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; TimeoutError after `timeout`, or the store's own."""
        timeout = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"wait timeout after {timeout}, keys: {', '.join(keys)}")
            time.sleep(PAUSE)

    def _append(self, kind: _Kind, key: str, value: bytes = b"", expected: bytes = b"") -> bytes:
        mark, name = uuid.uuid4().bytes, key.encode()
        lengths = len(name), len(value), len(expected)
        record = _RECORD.pack(kind, mark, *lengths) + name + value + expected
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # a rank that is killed leaves it
            try:
                begin = _BEGIN + self._end[0]
                if begin + len(record) > ROOM:
                    raise OSError(f"the ranks have told each other more than {ROOM >> 20} MB")
                self._memory[begin : begin + len(record)] = record
                self._end[0] += len(record)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._results[mark] = b""
            self._read()
            return self._results.pop(mark)

    def _read(self) -> None:
        """Read what all ranks have appended since."""
        with self._lock:
            end = self._end[0]
            while self._offset < end:
                begin = _BEGIN + self._offset
                kind, mark, *lengths = _RECORD.unpack_from(self._memory, begin)
                begin += _RECORD.size
                parts = []
                for length in lengths:
                    parts.append(self._memory[begin : begin + length])
                    begin += length
                self._offset = begin - _BEGIN
                name, value, expected = parts
                result = self._apply(_Kind(kind), name.decode(), value, expected)
                if mark in self._results:
                    self._results[mark] = result

    def _apply(self, kind: _Kind, key: str, value: bytes, expected: bytes) -> bytes:
        before = self._values.get(key)
        if kind is _Kind.DELETE:
            self._values.pop(key, None)
            return b"0" if before is None else b"1"
        if kind is _Kind.ADD:
            value = str(int(before or b"0") + int(value)).encode()
        elif kind is _Kind.COMPARE_SET and (before or b"") != expected:
            return expected if before is None else before
        self._values[key] = value
        return value


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
