"""From a folder to a bucket; what is there already is sent again only if it is gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tpunb.data import files, progress, room
from tpunb.data.bring import AT_ONCE, OWN
from tpunb.data.files import Place
from tpunb.data.remote import CHUNK, Say
from tpunb.errors import DataError


def send(folder: Path, url: str, say: Say) -> None:
    """Copy a file or the files of a folder to a URL of fsspec's, where nothing is overwritten.

    What is there with the same content is left. Raises DataError before anything was sent if
    something else is there under the same name.
    """
    if not folder.exists():
        raise DataError(f"there is no folder {folder}")
    if url.startswith(("http://", "https://")):
        raise DataError(f"nothing can be sent to {url}: name a bucket, as in gs://NAME/FOLDER")
    there = files.place(url)
    mine = _mine(folder)
    if not mine:
        raise DataError(f"{folder} is empty: there is nothing to send")
    theirs = _theirs(there)
    if "" in theirs:
        raise DataError(f"{there.shown} is a file: name a folder")
    left = {name for name, path in mine.items() if name in theirs and _same(path, theirs[name])}
    if other := sorted(mine.keys() & theirs.keys() - left):
        first = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        raise DataError(
            f"{there.shown} has other files of these names: {first}. Nothing was sent or "
            "overwritten: name another folder"
        )
    rest = [name for name in mine if name not in left]
    total = sum(mine[name].stat().st_size for name in rest)
    with progress.bar(f"{len(rest)} files", total) as bar, ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda name: _put(mine[name], there.under(name), bar), rest):
            pass
    known = f", {len(left)} were there already" if left else ""
    say(f"{there.shown}: {len(rest)} files, {room.size(total)} sent{known}")


def _mine(folder: Path) -> dict[str, Path]:
    """The files to send by the names they get there."""
    if folder.is_file():
        return {folder.name: folder}
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): folder / path for path in found if OWN not in path.parts}


def _theirs(there: Place) -> dict[str, files.PlaceFile]:
    try:
        exists = there.system.exists(there.path)
    except OSError:
        exists = True  # listing it says what is wrong
    if not exists:
        return {}
    try:
        with there.errors():
            return files.tree(there)
    except DataError:
        if there.system.isdir(there.path):  # one without files
            return {}
        raise


def _same(path: Path, there: files.PlaceFile) -> bool:
    if path.stat().st_size != there.size:
        return False
    if there.checksum is not None:
        return there.checksum.of(path) == there.checksum.hexadecimal
    with there.open(0, "") as opened, open(path, "rb") as file:
        return all(file.read(len(chunk)) == chunk for chunk in opened.chunks)


def _put(path: Path, there: Place, bar: Any) -> None:
    """Send a file, and look whether it is there."""
    with there.errors():
        with open(path, "rb") as source, _opened(there) as target:
            while chunk := source.read(CHUNK):
                target.write(chunk)
                bar.update(len(chunk))
        there.system.invalidate_cache()
        info = there.system.info(there.path)
    wrong = info.get("size") != path.stat().st_size
    if not wrong and (checksum := files.checksum(info)) is not None:
        wrong = checksum.of(path) != checksum.hexadecimal
    if wrong:
        raise DataError(f"{there.shown} is not there as it was sent: send it again")


def _opened(there: Place) -> Any:
    """A file to write. Folders are made only where they are missed.

    Buckets have none: gcsfs would look for the bucket itself, which writers need not be allowed.
    """
    try:
        return there.system.open(there.path, "wb")
    except FileNotFoundError:
        there.system.makedirs(there.path.rpartition("/")[0], exist_ok=True)
        return there.system.open(there.path, "wb")
