"""Helpers for tests of downloads."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

from tpunb.data import WORK, DataOptions, run

NOISE = random.Random(0).randbytes(3_000_000)


def downloaded(source: str, to: str) -> str:
    """Download into a folder; return the line shown to the user."""
    messages: list[str] = []
    run(DataOptions(source, to), messages.append)
    return "\n".join(messages)


def files(folder: str | Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and WORK not in path.parts
    }


def zipped(**files: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return made.getvalue()
