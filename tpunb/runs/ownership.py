"""Decide which folders are safe to use: those that only this user and root can write.

The files of a run are trusted like the user's own: its script runs, values of `--returns` are
unpickled, and requests are appended. A folder for runs may be shared, as /tmp is, so other users
can put forged folders into it. There are two rules:

- the folder of a run, and each folder in it, must be this user's, no link, and not
  writable by others (`why_refused`);
- the folder that holds these must not let others rename or replace what is in it
  (`why_replaceable`).

Folders above are not judged, because many are shared for good reasons. Whoever can replace a folder
from there can only lay a folder of his own, which the first rule refuses. A run's folder is held
open from its beginning (`HeldFolder`), so one that is laid in its place later is noticed.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path
from typing import NamedTuple

from tpunb.utils import owners
from tpunb.utils.errors import TpunbError

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OWN = "choose a folder of your own with `%tpu_setup --runs DIR`, `--runs DIR` in a terminal"


class Refusal(NamedTuple):
    """The reason why a folder is not used."""

    what: str
    """The reason, to follow "it is": 'another user's (ann)'."""
    then: str
    """The consequence for a run, or the fix."""
    otherwise: str = _OWN
    """The fix for a folder in which runs are to be made."""


def why_refused(folder: Path) -> Refusal | None:
    """Return why the folder of a run is not used; None if only this user can write to it."""
    try:
        status = folder.lstat()
    except OSError as error:
        return Refusal("not readable", error.strerror or str(error))
    if stat.S_ISLNK(status.st_mode):
        return Refusal("a link", "name the folder that the run itself is in with --runs")
    if not stat.S_ISDIR(status.st_mode):
        return Refusal("no folder", "it cannot be a run")
    return _judge(status, folder, folder.parent)


def require_own(folder: Path) -> None:
    """Raise TpunbError if a folder that holds the files of sweeps is not this user's alone."""
    refusal = why_refused(folder)
    if refusal is not None:
        raise TpunbError(f"{folder} is {refusal.what}, so it is not used: {refusal.otherwise}")


def why_replaceable(folder: Path | int, name: Path | None = None) -> Refusal | None:
    """Return why others can rename or replace what is in a folder; None if they cannot.

    `folder`: a path or a descriptor; `name`: its path for the fix. Raises OSError.
    """
    status = os.stat(folder)
    shown = shlex.quote(str(name or folder))
    if status.st_uid != _sudo_user() and not owners.is_trusted(status, folder):
        return Refusal(_another(status.st_uid), _OWN)
    if status.st_mode & stat.S_ISVTX or not owners.is_shared(status, folder):
        return None
    mine = os.geteuid() in (0, status.st_uid)
    fix = f"`chmod go-w {shown}`, or `chmod +t {shown}` if others keep runs in it too"
    return Refusal("writable by other users", fix if mine else _OWN)


def require_not_replaceable(folder: Path | int, name: Path) -> None:
    """Raise TpunbError with the fix if others can rename or replace what is in a folder."""
    refusal = why_replaceable(folder, name)
    if refusal is not None:
        raise TpunbError(
            f"the folder of runs {name} is {refusal.what}, who could put folders of their own in "
            f"the place of yours and have their code run as you: {refusal.then}"
        )


class HeldFolder:
    """A folder of this user alone that is kept open: its files are read whatever its path becomes.

    Raises TpunbError if it is not such a folder, OSError if it cannot be opened.
    """

    def __init__(self, path: Path, within: int | None = None) -> None:
        """`within`: the descriptor of the folder that it is in, if that is open."""
        self.path = path
        name = path if within is None else Path(path.name)
        try:
            self._fd = os.open(name, _OPEN_FOLDER, dir_fd=within)
        except OSError as error:
            refusal = why_refused(path)
            if error.errno not in (errno.ELOOP, errno.ENOTDIR) or refusal is None:
                raise
            raise _refused(path, refusal) from None
        refusal = _judge(os.fstat(self._fd), path, self._fd)
        if refusal is not None:
            self.close()
            raise _refused(path, refusal)

    def open(self, *names: str) -> int:
        """Open a file in it, `names` being the folders on the way and its own name, for reading.

        No link is followed. Raises OSError, PermissionError if it is not this user's.
        """
        *folders, name = names
        here = os.dup(self._fd)
        try:
            for each in folders:
                inner = os.open(each, _OPEN_FOLDER, dir_fd=here)
                os.close(here)
                here = inner
                if not owners.is_own(os.fstat(here), here):
                    raise PermissionError(errno.EPERM, "another user's folder", each)
            return _open_own(name, here)
        finally:
            os.close(here)

    def path_of(self, name: str) -> Path:
        """Return a path for this process that leads into this folder, whatever is in its place."""
        return Path(f"/proc/self/fd/{self._fd}/{name}")

    def is_replaced(self) -> bool:
        """True if its path now names another folder or a link, or nothing."""
        try:
            return not os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except OSError:
            return True

    def close(self) -> None:
        """Close it; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def _judge(status: os.stat_result, folder: Path, within: Path | int) -> Refusal | None:
    """Judge a folder by its status. `within`: where to see how its file system stores owners."""
    if not owners.is_own(status, within):
        return Refusal(_another(status.st_uid), "only they can follow or stop it")
    if owners.is_shared(status, within if isinstance(within, int) else folder):
        fix = f"if none of them has changed it, `chmod go-w {shlex.quote(str(folder))}`"
        return Refusal("writable by other users", fix, fix)
    return None


def _open_own(name: str, folder: int) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and owners.is_own(status, folder):
        return fd
    os.close(fd)
    what = "another user's file" if stat.S_ISREG(status.st_mode) else "not a regular file"
    raise PermissionError(errno.EPERM, what, name)


def _refused(path: Path, refusal: Refusal) -> TpunbError:
    return TpunbError(f"{path} is {refusal.what}: {refusal.then}")


def _another(uid: int) -> str:
    return f"another user's ({owners.user_name(uid)})"


def _sudo_user() -> int | None:
    """The user who has become root with sudo, and so can act as root; None without sudo."""
    text = os.environ.get("SUDO_UID", "")
    return int(text) if os.geteuid() == 0 and text.isdecimal() else None
