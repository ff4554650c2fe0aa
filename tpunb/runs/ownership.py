"""Decide which run folders are safe to use: those that only this user and root can write.

The files of a run are trusted like the user's own: values of `--returns` are unpickled, and
requests are appended. A folder for runs may be shared, as /tmp is, so other users can put forged
run folders into it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Refusal(NamedTuple):
    """The reason why a run folder is not used."""

    what: str
    """The reason, to follow "it is": 'another user's (ann)'."""
    then: str
    """The consequence, or the fix."""


def why_refused(folder: Path) -> Refusal | None:
    """Return why a run folder is not used; None if only this user can write to it."""
    try:
        status = folder.lstat()
    except OSError as error:
        return Refusal("not readable", error.strerror or str(error))
    if stat.S_ISLNK(status.st_mode):
        return Refusal("a link", "name the folder that the run itself is in with --runs")
    if not stat.S_ISDIR(status.st_mode):
        return Refusal("no folder", "it cannot be a run")
    if status.st_uid != os.geteuid():
        owner = f"another user's ({_user(status.st_uid)})"
        return Refusal(owner, "only they can follow or stop it")
    if status.st_mode & _OTHERS and _keeps_modes(folder.parent, status.st_dev):
        fix = f"if none of them has changed it, `chmod go-w {shlex.quote(str(folder))}`"
        return Refusal("writable by other users", fix)
    return None


def is_own_file(fd: int) -> bool:
    """True if an open file belongs to this user."""
    return os.fstat(fd).st_uid == os.geteuid()


@lru_cache(maxsize=64)
def _keeps_modes(runs: Path, device: int) -> bool:
    """True if the file system stores modes: Windows disks and some servers report all writable."""
    with contextlib.suppress(OSError):
        folder = tempfile.mkdtemp(prefix=".tpunb-", dir=runs)  # writable by this user only
        try:
            return not os.lstat(folder).st_mode & _OTHERS
        finally:
            os.rmdir(folder)
    return True


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a number without a name
        return str(uid)
