"""Archives, unpacked where nothing in them can reach outside, and only if there is room."""

from __future__ import annotations

import shutil
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tpunb.data import room
from tpunb.data.remote import CHUNK
from tpunb.errors import DataError

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def is_archive(name: str) -> bool:
    """Whether a file of this name is unpacked. By name: .npz and .docx files are zips too."""
    return name.lower().endswith(SUFFIXES)


def unpack(archive: Path, name: str, folder: Path, progress: Any) -> None:
    """Unpack an archive that is called `name` into an empty folder, which is made.

    Raises DataError for one that is broken, or has a member that would end up outside of the
    folder, is a link, or is none of file and folder; then nothing of it stays.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    take = _zip if name.lower().endswith(".zip") else _tar
    try:
        take(archive, name, folder, progress)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        shutil.rmtree(folder)
        raise DataError(
            f"{name} is broken, or no archive ({error}); --no-unpack keeps it as it is"
        ) from None
    except BaseException:
        shutil.rmtree(folder)
        raise


def _zip(archive: Path, name: str, folder: Path, progress: Any) -> None:
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        for member in members:
            if stat.S_ISLNK(member.external_attr >> 16):
                raise _no(name, member.filename, "is a link")
            if member.flag_bits & 0x1:
                raise _no(name, member.filename, "wants a password")
        total = sum(member.file_size for member in members)
        room.need(folder, total, f"unpacking {name}")
        progress.reset(total)
        for member in members:
            path = _inside(folder, name, member.filename)
            if member.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            with file.open(member) as source:
                _write(source, path, progress)


def _tar(archive: Path, name: str, folder: Path, progress: Any) -> None:
    # Sizes are known only member by member: the first pass would unpack it all.
    progress.reset(None)
    with tarfile.open(archive, mode="r:*") as file:
        for member in file:
            path = _inside(folder, name, member.name)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            source = file.extractfile(member) if member.isreg() else None
            if source is None:
                raise _no(name, member.name, "is a link or a device")
            room.need(folder, member.size, f"unpacking {name}")
            with source:
                _write(source, path, progress)


def _inside(folder: Path, name: str, member: str) -> Path:
    pure = PurePosixPath(member)
    if pure.is_absolute() or ".." in pure.parts or "\\" in member or "\0" in member:
        raise _no(name, member, "would be written outside of the folder")
    return folder / pure


def _no(name: str, member: str, why: str) -> DataError:
    return DataError(
        f"{name}: its member {member!r} {why}, so it is not unpacked; --no-unpack keeps it as it is"
    )


def _write(source: IO[bytes], path: Path, progress: Any) -> None:
    """Modes, owners and dates of the archive are not taken over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        while chunk := source.read(CHUNK):
            file.write(chunk)
            progress.update(len(chunk))
