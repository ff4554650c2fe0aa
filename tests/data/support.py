"""Helpers for tests of downloads."""

from __future__ import annotations

import random
from pathlib import Path

from tpunb.data import WORK, download

NOISE = random.Random(0).randbytes(3_000_000)


def downloaded(source: str, to: str | None = None, **options: bool) -> tuple[Path, str]:
    """Download; return the folder and the lines shown to the user."""
    messages: list[str] = []
    folder = download(source, Path(to) if to else None, messages.append, **options)
    return folder, "\n".join(messages)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and WORK not in path.parts
    }
