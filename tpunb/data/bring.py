"""From a source to a folder: nothing is brought twice, and nothing there is overwritten.

DIR/…                            the files
DIR/.tpunb-data/record.json      what was brought here, from where
DIR/.tpunb-data/…                what has come of a download that was cut off
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tpunb.data import files, kaggle, progress, room, unpack, web
from tpunb.data.fetch import fetch, forget
from tpunb.data.files import PlaceFile
from tpunb.data.remote import Remote, Say, shown
from tpunb.errors import DataError

OWN = ".tpunb-data"
AT_ONCE = 8
"""Files of a folder that are read at the same time: each waits for its first byte."""
DEFAULT = Path("data")
"""Where sources go that are not told where: each into a folder of its own below."""


def bring(
    source: str, to: Path | None, env: Mapping[str, str], say: Say, *, unpacked: bool = True
) -> Path:
    """Bring a source into the folder `to`; where it is then.

    Inside Kaggle that is where it is mounted, if it is; `to` is made a link to it. Raises
    DataError, SetupError or MissingPackageError.
    """
    thing = kaggle.parse(source)
    if thing is not None and (there := kaggle.mounted(thing, env)) is not None:
        return _linked(thing.url, there, to, say)
    if "://" not in source:
        raise DataError(
            f"{source} is no source: those are URLs, as kaggle://competitions/NAME, "
            "gs://BUCKET/FOLDER or https://…; to send a folder away, add --upload URL"
        )
    name = thing.url if thing is not None else shown(source)
    key = f"{name}?{sha256(source.encode()).hexdigest()[:12]}" if "?" in source else name
    key += "" if unpacked else " --no-unpack"
    folder = to if to is not None else DEFAULT / (thing.name if thing else _folder_name(source))
    with _work(folder) as work:
        record = _record(work)
        if (done := record.get(key)) is not None and _all_there(folder, done):
            say(f"{name} is in {folder} already ({_count(done)}); nothing was fetched")
            return folder
        origin = ""
        if thing is not None:
            remote, origin = kaggle.locate(thing, env)
            made = _one(remote, folder, work, unpacked)
        elif source.startswith(("http://", "https://")):
            made = _one(web.WebFile(source), folder, work, unpacked)
        else:
            found = files.tree(files.place(source))
            made = (
                _one(found[""], folder, work, unpacked)
                if "" in found
                else _many(found, folder, work)
            )
        record[key] = made
        _write(work / "record.json", record)
    say(f"{name}: {_count(made)} in {folder}{f' (credentials: {origin})' if origin else ''}")
    return folder


def _folder_name(source: str) -> str:
    parts = urlsplit(source)
    name = parts.path.rstrip("/").rpartition("/")[2] or parts.netloc.rpartition("@")[2]
    for suffix in unpack.SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).stem if "." in name.strip(".") else name or "data"


def _linked(name: str, there: Path, to: Path | None, say: Say) -> Path:
    say(f"{name} is mounted at {there}: nothing to download")
    if to is None:
        return there
    if not (to.is_symlink() or to.exists()):
        to.parent.mkdir(parents=True, exist_ok=True)
        to.symlink_to(there)
    if to.resolve() != there.resolve():
        raise DataError(f"{to} is there already and is not a link to {there}: name another --to")
    say(f"{to} is a link to it")
    return to


@contextlib.contextmanager
def _work(folder: Path) -> Iterator[Path]:
    """The folder's own folder, for this process alone."""
    work = folder / OWN
    try:
        work.mkdir(parents=True, exist_ok=True)
    except (NotADirectoryError, FileExistsError):
        raise DataError(f"{folder} is a file: name a folder with --to") from None
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror}") from None
    lock = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield work
    except BlockingIOError:
        raise DataError(f"another process brings data to {folder}: wait for it") from None
    except KeyboardInterrupt:
        come = room.size(sum(part.stat().st_size for part in work.glob("*.part")))
        print(f"interrupted: {come} are not complete yet; the same again goes on from there")
        raise
    finally:
        os.close(lock)
        for made in (work, folder):  # where nothing has come, nothing stays
            with contextlib.suppress(OSError):
                made.rmdir()


def _record(work: Path) -> dict[str, dict[str, int]]:
    """Sources, and their files with their sizes."""
    try:
        found: dict[str, dict[str, int]] = json.loads((work / "record.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found


def _write(path: Path, content: Any) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)


def _all_there(folder: Path, recorded: dict[str, int]) -> bool:
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in recorded.items()
    )


def _count(made: dict[str, int]) -> str:
    what = "1 file" if len(made) == 1 else f"{len(made)} files"
    return f"{what}, {room.size(sum(made.values()))}"


def _one(remote: Remote, folder: Path, work: Path, unpacked: bool) -> dict[str, int]:
    """A single file, or what is in it."""
    if remote.name in ("", ".", "..") or "/" in remote.name:
        raise DataError(f"{remote.name!r} is no name for a file: it would lead out of the folder")
    archive = unpacked and unpack.is_archive(remote.name)
    part = work / f"{sha256(remote.name.encode()).hexdigest()[:12]}.part"
    with progress.bar(remote.name, None) as bar:
        # Of an archive's content it is only known that it is hardly smaller.
        fetch(remote, part, bar, factor=2 if archive else 1)
        fresh = work / "fresh"
        if archive:
            unpack.unpack(part, remote.name, fresh, bar)
    if archive:
        made = _put(fresh, folder)
    else:
        path = folder / remote.name
        if _differs(part, path):
            raise DataError(_taken(folder, [remote.name]))
        if not path.exists():
            part.rename(path)
        made = {remote.name: path.stat().st_size}
    forget(part)
    return made


def _put(fresh: Path, folder: Path) -> dict[str, int]:
    """Move files to where they belong, if none is in another one's place."""
    names = [str(path.relative_to(fresh)) for path in sorted(fresh.rglob("*")) if path.is_file()]
    taken = [name for name in names if _differs(fresh / name, folder / name)]
    if taken:
        shutil.rmtree(fresh)
        raise DataError(_taken(folder, taken))
    made = {}
    for name in names:
        path = folder / name
        made[name] = (fresh / name).stat().st_size
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).rename(path)
    for path in fresh.rglob("*"):
        if path.is_dir():  # also those without files
            (folder / path.relative_to(fresh)).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh)
    return made


def _taken(folder: Path, names: list[str]) -> str:
    first = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{folder} has other files of these names: {first}. Nothing was overwritten: move them "
        "away, or name another folder with --to"
    )


def _differs(new: Path, old: Path) -> bool:
    """Whether a file may not go where something is."""
    if not (old.is_symlink() or old.exists()):
        return any(parent.is_file() for parent in old.parents)
    return not (old.is_file() and filecmp.cmp(new, old, shallow=False))


def _many(found: dict[str, PlaceFile], folder: Path, work: Path) -> dict[str, int]:
    """A folder of a bucket, file by file; those that are here already are left."""
    here = {name for name, one in found.items() if _is_here(folder / name, one)}
    taken = [name for name in found if name not in here and (folder / name).exists()]
    if taken:
        raise DataError(_taken(folder, taken))
    total = sum(one.size or 0 for one in found.values())
    done = sum(found[name].size or 0 for name in here)
    room.need(folder, total - done, "the rest of it")
    stopped = threading.Event()

    def one_file(name: str) -> None:
        part = work / f"{sha256(name.encode()).hexdigest()[:12]}.part"
        fetch(found[name], part, _Counted(bar, stopped))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        part.rename(folder / name)
        forget(part)

    with progress.bar(f"{len(found)} files", total, done) as bar:
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            for _ in pool.map(one_file, [name for name in found if name not in here]):
                pass
        except BaseException:
            stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return {name: (folder / name).stat().st_size for name in found}


class _Counted:
    """The bar of all files, for one of them."""

    def __init__(self, bar: Any, stopped: threading.Event) -> None:
        self._bar = bar
        self._stopped = stopped
        self.total: int | None = None
        self.n = 0

    def update(self, count: int) -> None:
        """Count; or end, where the person or another file's failure ends it all."""
        if self._stopped.is_set():
            raise DataError("stopped")
        self._bar.update(count)


def _is_here(path: Path, there: PlaceFile) -> bool:
    """The same size, and the same content as far as the place says something of it."""
    if not path.is_file() or path.stat().st_size != there.size:
        return False
    checksum = there.checksum
    return checksum is None or checksum.of(path) == checksum.hexadecimal
