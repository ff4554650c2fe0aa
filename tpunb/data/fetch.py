"""One file, brought here: resumed where it was cut off, checked, and whole or not there."""

from __future__ import annotations

import errno
import http.client
import json
import time
from pathlib import Path
from typing import Any

from tpunb.data import room
from tpunb.data.remote import Remote
from tpunb.errors import DataError

TRIES = 5
"""How often in a row a lost connection is taken up again without a byte having come."""
PAUSE = 1.0
"""Seconds before the first of these; each next is twice as long."""


def fetch(remote: Remote, part: Path, progress: Any, *, factor: int = 1) -> None:
    """Bring a file to the path `part`, where all or a piece of it may be from an earlier call.

    `factor`: how many times its size will be needed there in the end. Raises DataError. What
    has come until then, or until an interrupt, stays for the next call; a file whose content
    is not what it should be does not.
    """
    failed = 0
    while not _note(part).get("whole"):
        before = _size(part)
        try:
            _attempt(remote, part, progress, factor)
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                come = room.size(_size(part))
                raise DataError(f"{remote.name}: the disk is full ({come} have come)") from None
            failed = 0 if _size(part) > before else failed + 1
            if failed >= TRIES:
                raise DataError(
                    f"{remote.name}: the connection is lost again and again ({error}). "
                    f"{room.size(_size(part))} have come; the same again goes on from there"
                ) from None
            time.sleep(PAUSE * 2 ** max(0, failed - 1))


def forget(part: Path) -> None:
    """Remove what was fetched, and what is known of it."""
    part.unlink(missing_ok=True)
    _beside(part).unlink(missing_ok=True)


def _attempt(remote: Remote, part: Path, progress: Any, factor: int) -> None:
    """Read to the end once, and check. A piece of another file, or of who knows which, goes."""
    identity = _note(part).get("identity", "")
    start = _size(part) if identity else 0
    with remote.open(start, identity) as opened:
        if opened.start not in (0, start):
            raise DataError(f"{remote.name}: the server sends another part than asked for")
        if opened.start == 0:
            forget(part)
        if opened.size is not None:
            room.need(part.parent, opened.size * factor - opened.start, remote.name)
            progress.total = opened.size
        note = {"identity": opened.identity}
        _beside(part).write_text(json.dumps(note), encoding="utf-8")
        progress.n = count = opened.start
        with open(part, "ab") as file:
            for chunk in opened.chunks:
                file.write(chunk)
                progress.update(len(chunk))
                count += len(chunk)
    if opened.size is not None and count < opened.size:
        raise ConnectionError(f"it ended after {count} of {opened.size} bytes")
    wrong = ""
    if opened.size is not None and count > opened.size:
        wrong = f"has {count} bytes and not {opened.size}"
    elif opened.checksum is not None and opened.checksum.of(part) != opened.checksum.hexadecimal:
        wrong = f"does not have the {opened.checksum.algorithm} that it should have"
    if wrong:
        forget(part)
        raise DataError(f"{remote.name}: what has come {wrong}, and was removed: try again")
    _beside(part).write_text(json.dumps({**note, "whole": True}), encoding="utf-8")


def _beside(part: Path) -> Path:
    return part.with_name(f"{part.name}.of")


def _note(part: Path) -> dict[str, Any]:
    """Which file the piece is of, and whether it is all of it; empty where that is not known."""
    try:
        found: dict[str, Any] = json.loads(_beside(part).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if part.exists() else {}


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0
