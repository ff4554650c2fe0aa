"""Copies a pod's run folder to the bucket of its checkpoints, where it outlives the pod.

<checkpoints>/<run id>          checkpoints of tpunb.save
<checkpoints>/<run id>.run/K    the run folder of host K
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpunb.places.errors import PlaceError
from tpunb.runs import stream
from tpunb.runs.directory import RunDir

_LEFT = frozenset(["variables.json", "checkpoints", "given"])


def put_folder(run: RunDir, url: str, node_rank: int) -> None:
    """Copy a host's run folder to the bucket. Raises the file system's own exceptions."""
    from fsspec.core import url_to_fs

    system, root = url_to_fs(f"{url.rstrip('/')}.run/{node_rank}")
    for path in sorted(run.path.rglob("*")):
        inside = path.relative_to(run.path)
        if inside.parts[0] in _LEFT or inside.name.startswith(".") or path.is_symlink():
            continue
        if path.is_file():
            there = f"{root}/{inside.as_posix()}"
            system.makedirs(os.path.dirname(there), exist_ok=True)
            system.put_file(str(path), there)


def get_files(url: str, node_rank: int, patterns: Sequence[str], into: Path) -> list[Path]:
    """Copy a host's matching files into a local folder; [] if there are none.

    A pattern is the path of a file or a folder, with `*` for anything. Raises PlaceError if the
    URL cannot be read.
    """
    try:
        return list(_get_files(f"{url.rstrip('/')}.run/{node_rank}", patterns, into))
    except ImportError as error:
        raise PlaceError(f"{url} cannot be read on this machine: {error}") from None
    except Exception as error:  # each file system of fsspec has its own exceptions
        raise PlaceError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _get_files(url: str, patterns: Sequence[str], into: Path) -> Iterator[Path]:
    from fsspec.core import url_to_fs

    system, root = url_to_fs(url)
    for found in system.find(root):
        name = str(found).removeprefix(root).strip("/")
        if ".." in name.split("/") or not stream.matches(name, patterns):
            continue
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        system.get_file(found, str(path))
        yield path
