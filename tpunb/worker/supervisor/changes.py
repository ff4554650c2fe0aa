"""Changes in a run's folder, by inotify: a supervisor sleeps while nothing is written there."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_libc = ctypes.CDLL(None)
_MODIFY, _MOVED_TO, _CREATE, _FOLDER = 0x2, 0x80, 0x100, 0x40000000
"""Bits of sys/inotify.h."""
_EVENT = struct.Struct("iIII")
"""Watch, bits, cookie, and the length of the name that follows."""


class Changes:
    """Makes `fd` readable when a file of a run is written, by this process or another.

    A file system may tell nothing: rely on it only once `told` is true.
    """

    def __init__(self, folder: Path) -> None:
        self.told = False
        self._folder = folder
        self.fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch()

    def _watch(self) -> None:
        for folder in (self._folder, *self._folder.glob("attempts/**/")):
            _libc.inotify_add_watch(self.fd, os.fsencode(folder), _MODIFY | _MOVED_TO | _CREATE)

    def read(self) -> bool:
        """Forget the changes until now; return whether there was one."""
        found = folders = False
        while data := self._read():
            found, at = True, 0
            while at < len(data):
                _, bits, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                folders |= bool(bits & _FOLDER)
        if folders:  # there are new ones
            self._watch()
        self.told |= found
        return found

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, 1 << 16)
        except OSError:  # no more, or no inotify
            return b""

    def close(self) -> None:
        """Stop watching."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
