"""Runs in a bucket (`%tpu_setup --runs URL`), read on another machine from a copy of small files.

`tpunb runs URL` and `tpunb logs --runs URL` read a folder in the user's cache that has the files
that they need of each run. Files that have not changed in the bucket are not downloaded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.utils import files, records
from tpunb.utils.errors import TpunbError

SMALL = 2_000_000
"""The most bytes of a file that is downloaded for a list of runs."""
_LISTED = ("spec.json", "result.json", "values.json", "metrics.jsonl")
_LOGS = ("run.log", "events.jsonl")
_AT_ONCE = 16
_VERSIONS = ("etag", "ETag", "md5Hash", "generation", "mtime", "updated", "LastModified", "created")
"""Fields of fsspec's file infos that change with the content."""


def is_url(text: str) -> bool:
    """True if the text is a URL, not a folder of this machine."""
    return "://" in text


def cached_runs(url: str) -> Path:
    """Return a local folder with the current runs at a URL and the files that lists of runs need.

    Raises TpunbError if the bucket cannot be read.
    """
    cache = _cache_of(url)
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _explained(url):
        system, root = _open(url)
        try:
            entries = system.ls(root, detail=True)
        except FileNotFoundError:
            entries = []
        places = [str(e["name"]).rstrip("/") for e in entries if e["type"] == "directory"]
        with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda place: _copy_run(system, place, cache, url), places))
    here = {place.rpartition("/")[2] for place in places}
    for folder in cache.iterdir():
        if folder.name not in here:  # removed from the bucket
            shutil.rmtree(folder, ignore_errors=True)
    return cache


def load_log(run: RunDir) -> None:
    """Download the log of a run in `cached_runs`; do nothing for a run of this machine.

    Raises TpunbError if the bucket cannot be read.
    """
    url = records.read_dict(run.copied).get("url")
    if isinstance(url, str):
        with _explained(url):
            system, place = _open(url)
            _copy(system, place, run.path, url, _LOGS, most=None)


def _open(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    system, root = url_to_fs(url)
    system.invalidate_cache()
    return system, root.rstrip("/")


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, ValueError) as error:  # «Please install gcsfs to access Google Storage»
        raise TpunbError(f"{url}: {error}") from None
    # Each library for a kind of bucket has errors of its own.
    except Exception as error:
        raise TpunbError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _cache_of(url: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return Path(base) / "tpunb" / "runs" / name


def _copy_run(system: Any, place: str, cache: Path, url: str) -> None:
    name = place.rpartition("/")[2]
    _copy(system, place, cache / name, f"{url.rstrip('/')}/{name}", _LISTED, most=SMALL)


def _copy(
    system: Any, place: str, folder: Path, url: str, wanted: Sequence[str], most: int | None
) -> None:
    """Download the wanted files that have changed and have no more than `most` bytes."""
    infos = {
        str(entry["name"]).rpartition("/")[2]: entry for entry in system.ls(place, detail=True)
    }
    if "spec.json" not in infos:
        return  # another folder, or a run that has just begun
    folder.mkdir(mode=0o700, exist_ok=True)
    run = RunDir(folder)
    versions = dict(records.read_dict(run.copied).get("versions") or {})
    for name in wanted:
        info = infos.get(name)
        if info is None or (most is not None and info.get("size", 0) > most):
            continue
        version = json.dumps([info.get("size"), *(str(info.get(field)) for field in _VERSIONS)])
        if versions.get(name) == version and (folder / name).exists():
            continue
        files.atomic_write(folder / name, system.cat_file(f"{place}/{name}"))
        versions[name] = version
    # The source, and the versions that the bucket reported for the files.
    files.write_json(run.copied, {"url": url, "versions": versions})
