"""A store for the ranks of one machine, in shared memory to which each rank appends.

torch elastic's TCPStore listens, serves any process that connects, and looks up the name of each
address that it connects to: if no DNS server answers, each rank waits 10 s (torch 2.8, 2.9). The
memory is a file without a name: only processes that have inherited it can open it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

PAUSE = 0.002
"""Seconds between two checks of a rank that waits for a key."""
_RECORD = struct.Struct("<?II")
"""The head of a record: is the key deleted, and the lengths of key and value, which follow."""

ROOM = 1 << 28
"""Bytes of each half of the memory. Pages that were never written to take no memory."""
_BEGIN = 8
_GENERATION = 1 << 32
"""The memory begins with one number: the generation times this, plus the bytes of its records."""
_SLACK = 1 << 20
"""Bytes of overwritten records that are not worth a clean-up."""

_Change = Callable[[bytes | None], bytes | None]
"""Function from the old value of a key to the new one; None stands for no value."""


class Board(Store):
    """A store on the memory file with descriptor `file`, inherited by all ranks.

    To change a value, a rank takes the lock, reads the records that are new to it, and appends a
    record: all ranks read the records in the same order. Readers take a shared lock, but only if
    the number at the beginning shows that there are new records: with FileStore, whose readers
    always do, 64 ranks that waited for each other took 42 s. The memory is mapped, not read as a
    file: the system may return zeros for a page to which another process is just appending.

    When most records have been overwritten, the next rank that appends writes the current values to
    the other half of the memory, and all ranks continue there: so ranks can publish their waits
    for weeks.
    """

    def __init__(self, file: int, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        # Opened again, because locks of one opening do not exclude each other.
        self._file = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        os.truncate(self._file, _BEGIN + 2 * ROOM)
        self._memory = mmap.mmap(self._file, _BEGIN + 2 * ROOM)
        self._head = memoryview(self._memory)[:_BEGIN].cast("Q")
        self._lock = threading.RLock()
        self._generation = 0
        self._offset = 0
        """Bytes of this generation's records that have been read."""
        self._most = _SLACK
        """Bytes of records from which on it is time to clean up."""
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._change(key, lambda before: _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key. Waits for it; raises TimeoutError after the store's time-out."""
        self.wait([key])
        with self._lock:
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        _, after = self._change(key, lambda before: str(int(before or b"0") + amount).encode())
        return int(after or b"0")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = _bytes(expected)
        _, after = self._change(
            key, lambda before: _bytes(desired) if (before or b"") == wanted else before
        )
        return wanted if after is None else after

    def delete_key(self, key: str) -> bool:
        before, _ = self._change(key, lambda before: None)
        return before is not None

    def num_keys(self) -> int:
        with self._lock:
            self._catch_up()
            return len(self._values)

    # torch calls these names from C++ (2.8, 2.9).
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            self._catch_up()
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist; raises TimeoutError after `timeout`, or the store's own."""
        timeout = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"wait timeout after {timeout}, keys: {', '.join(keys)}")
            time.sleep(PAUSE)

    def _change(self, key: str, change: _Change) -> tuple[bytes | None, bytes | None]:
        """Change the value of a key; return the values before and after."""
        with self._lock:
            try:  # an interrupt may come right after the lock; one that is not held can be released
                fcntl.flock(self._file, fcntl.LOCK_EX)
                self._read()
                before = self._values.get(key)
                after = change(before)
                if after != before:
                    self._append(_record(key, after))
                return before, after
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also by the system if a rank is killed

    def _catch_up(self) -> None:
        """Read the records that ranks have appended since the last call, if there are any.

        With the lock, which orders memory on every processor: otherwise this rank might see the
        number before the records.
        """
        if self._head[0] != self._generation * _GENERATION + self._offset:
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH)
                self._read()
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _append(self, record: bytes) -> None:
        if self._offset + len(record) > min(self._most + len(record), ROOM):
            self._clean_up()
        if self._offset + len(record) > ROOM:
            raise OSError(f"the ranks have stored more than {ROOM >> 20} MB in their shared store")
        begin = self._begin() + self._offset
        self._memory[begin : begin + len(record)] = record
        self._head[0] += len(record)
        self._read()

    def _clean_up(self) -> None:
        """Begin the next generation, with one record for each value."""
        records = b"".join(_record(key, value) for key, value in self._values.items())
        begin = self._begin(self._generation + 1)
        self._memory[begin : begin + len(records)] = records
        self._head[0] = (self._generation + 1) * _GENERATION + len(records)
        self._read()

    def _begin(self, generation: int | None = None) -> int:
        """The offset of a generation's records: generations use the two halves in turn."""
        generation = self._generation if generation is None else generation
        return _BEGIN + generation % 2 * ROOM

    def _read(self) -> None:
        """Apply the records that are new to this rank, with the lock."""
        generation, end = divmod(self._head[0], _GENERATION)
        if generation != self._generation:
            self._generation, self._offset, self._values = generation, 0, {}
            self._most = 2 * end + _SLACK
        begin, first = self._begin(), self._offset
        records = self._memory[begin + first : begin + end]
        at = 0
        while at < len(records):  # an interrupt may come between any two
            at = self._apply(records, at)
            self._offset = first + at

    def _apply(self, records: bytes, at: int) -> int:
        """Apply one record; return where the next one begins."""
        deleted, key_length, length = _RECORD.unpack_from(records, at)
        at += _RECORD.size
        key = records[at : at + key_length].decode()
        at += key_length
        if deleted:
            self._values.pop(key, None)
        else:
            self._values[key] = records[at : at + length]
        return at + int(length)


def _record(key: str, value: bytes | None) -> bytes:
    name = key.encode()
    return _RECORD.pack(value is None, len(name), len(value or b"")) + name + (value or b"")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
