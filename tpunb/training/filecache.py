"""`FileCache`: many small files as one, read once, in memory that all ranks share."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from tpunb.errors import DataError

RAM = Path("/dev/shm")
_SPARE = 0.5
"""The share of the RAM disk that is left to others: workers of loaders need it, too."""


class FileCache(Mapping[str, memoryview]):
    """The contents of files, by path: `Image.open(cache.open(path))`.

        cache = FileCache(Path("images").rglob("*.jpg"))

    The first process reads the files, one after the other; others of this machine wait for it,
    and all map the same memory: so it costs once what the files take, whatever number of ranks
    and workers there are. To open and read a file then is to look into memory.

    It lies on the RAM disk (/dev/shm) if half of what is free there is enough, else in a
    temporary folder on a disk, from where the system keeps in memory what it can. It stays for
    the next run, which has it at once if no file has changed, until `remove()` or a restart of
    the machine.
    """

    def __init__(
        self, paths: Iterable[str | os.PathLike[str]], *, folder: str | Path | None = None
    ) -> None:
        """`folder`: where it is to lie. Raises DataError if a file cannot be read, or no room."""
        self._places: dict[str, tuple[int, int]] = {}
        about, end = hashlib.sha256(), 0
        for given in paths:
            path = os.fspath(given)
            try:
                found = os.stat(path)
            except OSError as error:
                raise DataError(f"FileCache: {path}: {error.strerror}") from error
            self._places[path] = end, end + found.st_size
            end += found.st_size
            name = os.path.abspath(path)
            about.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
        self.size = end
        """Bytes of all files."""
        place = _place(end) if folder is None else Path(folder)
        self.path = place / f"tpunb-cache-{os.getuid()}-{about.hexdigest()[:16]}"
        """The one file."""
        try:
            self._build()
        except OSError as error:
            raise DataError(
                f"FileCache: cannot write {end / 1e6:.0f} MB to {place}: {error.strerror}. "
                "Another place: FileCache(…, folder=…)"
            ) from error
        self._map()

    def __getitem__(self, path: str | os.PathLike[str]) -> memoryview:
        """The content of a file, not copied."""
        first, end = self._places[os.fspath(path)]
        return self._memory[first:end]

    def open(self, path: str | os.PathLike[str]) -> BytesIO:
        """The content of a file as an open file."""
        return BytesIO(self[path])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def remove(self) -> None:
        """Take it away; who has it open keeps it until its end."""
        self.path.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f"{self.path.name}.lock")

    def _build(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # who comes later waits here, and finds it made
            if self.path.exists():
                return
            part = self.path.with_name(f"{self.path.name}.part")
            try:
                with open(part, "wb") as out:
                    # Room now, or an error: a page that a full RAM disk lacks later is a crash.
                    os.posix_fallocate(out.fileno(), 0, max(self.size, 1))
                    for path, (first, end) in self._places.items():
                        if out.write(Path(path).read_bytes()) != end - first:
                            raise DataError(f"FileCache: {path} changed while it was read")
                part.replace(self.path)
            finally:
                part.unlink(missing_ok=True)

    def _map(self) -> None:
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._memory = memoryview(mapped)

    def __getstate__(self) -> dict[str, Any]:
        # For workers that are not forked.
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()


def _place(size: int) -> Path:
    if RAM.is_dir() and os.access(RAM, os.W_OK) and size < shutil.disk_usage(RAM).free * _SPARE:
        return RAM
    return Path(tempfile.gettempdir())
