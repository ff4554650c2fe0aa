"""Packs files for hosts: those of a run, and the user's."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tpunb.runs.directory import RunDir


def pack(entries: Mapping[str, Path | bytes], compression: str = "") -> bytes:
    """Make a tar archive of files and folders, keyed by path in it; '' for no compression.

    Links are packed as the files that they point to, which the other machine does not have.
    """
    data = io.BytesIO()
    level: dict[str, Any] = {"compresslevel": 1} if compression == "gz" else {}
    mode: Any = f"w:{compression}"
    with tarfile.open(fileobj=data, mode=mode, dereference=True, **level) as archive:
        for name, content in entries.items():
            if isinstance(content, Path):
                archive.add(content, name, filter=_without_owner)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
    return member


def run_files(run: RunDir, names: Iterable[str]) -> dict[str, Path | bytes]:
    """Those of the named files and folders that a run folder has, as entries of an archive."""
    return {name: run.path / name for name in names if (run.path / name).exists()}
