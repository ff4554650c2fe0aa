"""Files in any place that fsspec knows: buckets, and what else has a URL."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tpunb.data.remote import Checksum, Opened, shown
from tpunb.errors import DataError, MissingPackageError

_IDENTITY = ("generation", "ETag", "etag", "md5Hash", "LastModified", "updated", "mtime", "created")
"""What the infos of fsspec's file systems have that changes with the content."""

_NETWORK = ("aiohttp", "botocore", "requests", "urllib3")
"""Libraries below fsspec's that raise errors of their own where a connection is lost."""
CHUNK = 8 << 20
"""Bytes of a read: gcsfs asks for each by itself, and waits for the answer."""


@dataclass(frozen=True)
class Place:
    """A path in a file system of fsspec's."""

    system: Any
    path: str
    shown: str

    def under(self, relative: str) -> Place:
        """A file below it."""
        there = f"{self.path.rstrip('/')}/{relative}"
        return Place(self.system, there, f"{self.shown.rstrip('/')}/{relative}")

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """What goes wrong there, in words that say what to do; a lost connection as it is."""
        try:
            yield
        except FileNotFoundError:
            raise DataError(
                f"there is nothing at {self.shown}: check the spelling, and that you may list it"
            ) from None
        except Exception as error:
            # gcsfs raises OSError('Forbidden: …') and its own HttpError, google.auth its own.
            text = f"{type(error).__name__}: {error}"
            if "DefaultCredentials" in text or "401" in text or "nonymous" in text:
                raise DataError(
                    f"{self.shown} wants a login, and none was found: "
                    "`gcloud auth application-default login`, or on Colab "
                    "`from google.colab import auth; auth.authenticate_user()`"
                ) from None
            if isinstance(error, PermissionError) or "Forbidden" in text or "403" in text:
                raise DataError(
                    f"{self.shown}: you may not do that there. The account that this machine "
                    "uses needs the role Storage Object Viewer on the bucket to read, Storage "
                    "Object User to write; `gcloud auth list` shows which account it is"
                ) from None
            library = type(error).__module__.partition(".")[0]
            if library in _NETWORK or isinstance(error, asyncio.TimeoutError):
                raise ConnectionError(text) from None
            raise


def place(url: str) -> Place:
    """Where a URL leads. Raises MissingPackageError or DataError if fsspec cannot go there."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        system, path = url_to_fs(url)
    except ImportError:
        package = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs"}.get(scheme)
        install = f"`pip install {package}`" if package else f"fsspec's package for {scheme}://"
        raise MissingPackageError(package or "a package", f"{scheme}:// URLs", install) from None
    except ValueError:
        raise DataError(f"{shown(url)}: nothing is known of {scheme}:// URLs") from None
    system.invalidate_cache()
    return Place(system, path, shown(url))


class PlaceFile:
    """One file of it: see Remote."""

    def __init__(self, there: Place, info: dict[str, Any]) -> None:
        self._there = there
        self._info = info
        self.name = there.path.rstrip("/").rpartition("/")[2]

    @property
    def size(self) -> int | None:
        size: int | None = self._info.get("size")
        return size

    @property
    def checksum(self) -> Checksum | None:
        """What the store says of its content."""
        return checksum(self._info)

    @contextlib.contextmanager
    def open(self, start: int, identity: str) -> Iterator[Opened]:
        """From its beginning if it is another file than it was."""
        current = next((f"{key} {self._info[key]}" for key in _IDENTITY if key in self._info), "")
        begin = start if current == identity else 0
        with self._there.errors():
            file = self._there.system.open(self._there.path, "rb")
        with file:
            file.seek(begin)
            yield Opened(begin, self.size, current, self.checksum, self._chunks(file))

    def _chunks(self, file: Any) -> Iterator[bytes]:
        while True:
            with self._there.errors():
                chunk = file.read(CHUNK)
            if not chunk:
                return
            yield chunk


def checksum(info: dict[str, Any]) -> Checksum | None:
    """What Google's store says of an object; others' ETags are only sometimes of the content."""
    return Checksum.given({"md5": info.get("md5Hash", ""), "crc32c": info.get("crc32c", "")})


def tree(there: Place) -> dict[str, PlaceFile]:
    """All files below a path, by their path below it; the one at it by an empty name."""
    with there.errors():
        found: dict[str, dict[str, Any]] = there.system.find(there.path, detail=True)
        if not found:
            raise FileNotFoundError(there.path)
        if set(found) == {there.path}:  # fsspec's own `find` knows nothing of a single file
            return {"": PlaceFile(there, found[there.path] or there.system.info(there.path))}
    root = there.path.rstrip("/") + "/"
    files = {}
    for path, info in sorted(found.items()):
        relative = path.removeprefix(root)
        if path.endswith("/"):  # an empty object that stands for a folder
            continue
        if relative.startswith("/") or ".." in relative.split("/"):
            raise DataError(f"{there.shown}: the name {relative!r} leads out of the folder")
        files[relative] = PlaceFile(there.under(relative), info)
    return files
