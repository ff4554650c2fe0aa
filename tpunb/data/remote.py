"""What a download needs to know of a file elsewhere, and how it is read from any place in it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

CHUNK = 1 << 20


@dataclass(frozen=True)
class Checksum:
    """What the place says that the file's content must give."""

    algorithm: str
    """'md5' or 'crc32c'."""
    hexadecimal: str

    def of(self, path: Path) -> str:
        """The same of a file that is here."""
        made = _crc32c() if self.algorithm == "crc32c" else hashlib.new(self.algorithm)
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                made.update(chunk)
        return str(made.digest().hex())

    @classmethod
    def given(cls, values: dict[str, str]) -> Checksum | None:
        """The best of those that can be checked here; values are in base64, by algorithm."""
        for name in ("md5", "crc32c"):
            value = values.get(name)
            if value and (name != "crc32c" or _crc32c() is not None):
                with contextlib.suppress(ValueError):  # no base64: some place's own form
                    return cls(name, base64.b64decode(value, validate=True).hex())
        return None


def _crc32c() -> Any:
    """Google's checksum of objects that were put together from parts; gcsfs brings its package."""
    try:
        from google_crc32c import Checksum
    except ImportError:
        return None
    return Checksum()


@dataclass(frozen=True)
class Opened:
    """A file elsewhere, being read."""

    start: int
    """Where `chunks` begin: as asked, or 0 where the place cannot begin elsewhere, or has
    another file by now."""
    size: int | None
    """Of the whole file."""
    identity: str
    """Other content has another one: an ETag, a date. Empty: nobody knows."""
    checksum: Checksum | None
    chunks: Iterator[bytes]


class Remote(Protocol):
    """A file elsewhere."""

    name: str
    """What it is called there, without folders."""

    def open(self, start: int, identity: str) -> AbstractContextManager[Opened]:
        """Read it from byte `start` on, if it still is the file of this `identity`.

        Raises DataError for what a repetition does not mend, and OSError where the connection
        is lost; so does iterating over the chunks.
        """


Say = Callable[[str], None]
"""Takes lines for the person."""


def shown(url: str) -> str:
    """A URL without what may be secret in it: user, password, signed queries."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
