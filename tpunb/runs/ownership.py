"""Which run folders are used: those that nobody but this user, and root, can have written.

What a run has left is trusted as the user's own: values of `--returns` are unpickled, and requests
are appended. A folder for runs may be shared, and /tmp is, so somebody else can lay a run there.
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
    """Why a run folder is not used."""

    what: str
    """'another user's (ann)', after "it is"."""
    then: str
    """What follows from it, or what to do."""


def why_refused(folder: Path) -> Refusal | None:
    """Why a run folder is not used; None for one that is this user's alone."""
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
    """Whether an open file is this user's."""
    return os.fstat(fd).st_uid == os.geteuid()


@lru_cache(maxsize=64)
def _keeps_modes(runs: Path, device: int) -> bool:
    """Whether the file system tells who can write: Windows' disks and some servers say all can."""
    with contextlib.suppress(OSError):
        folder = tempfile.mkdtemp(prefix=".tpunb-", dir=runs)  # its user's only
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
