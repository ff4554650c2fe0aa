"""Decide which folders of runs are safe to use: those that belong to this user.

The files of a run are trusted like the user's own: its script runs, values of `--returns` are
unpickled, and requests are appended. A folder for runs may be shared, as /tmp is, so other users
can put forged folders into it. The folder of a run is made with mode 0700, and used only if it is
this user's and no link; files in it are opened only if they are (`files.open_file`). The folder
that holds runs may also be root's.

Folders above are not judged, because many are shared for good reasons. Whoever can replace a folder
from there can only lay a folder of his own, which this rule refuses. A run's folder is held open
from its beginning (`HeldFolder`), so one that is laid in its place later is noticed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tpunb.utils import owners
from tpunb.utils.errors import TpunbError

_OWN = "choose a folder of your own with `%tpu_setup --runs DIR`, `--runs DIR` in a terminal"


def why_refused(folder: Path) -> str:
    """Return why the folder of a run is not used: "another user's (ann)"; '' if it is."""
    try:
        status = folder.lstat()
    except OSError as error:
        return f"not readable ({error.strerror})"
    if stat.S_ISLNK(status.st_mode):
        return "a link"
    if not stat.S_ISDIR(status.st_mode):
        return "no folder"
    return "" if owners.is_own(status) else f"another user's ({owners.user_name(status.st_uid)})"


def require_own(folder: Path) -> None:
    """Raise TpunbError if a folder is not this user's."""
    if why := why_refused(folder):
        raise TpunbError(f"{folder} is {why}, so it is not used: {_OWN}")


def require_trusted(runs: Path) -> None:
    """Raise TpunbError if a folder that holds runs is not this user's or root's; or OSError.

    Its owner could put folders of their own in the place of runs.
    """
    status = runs.stat()
    if not owners.is_trusted(status):
        name = owners.user_name(status.st_uid)
        raise TpunbError(f"{runs} is another user's ({name}), so it is not used: {_OWN}")


class HeldFolder:
    """A folder of this user that is kept open: its files are read whatever its path becomes.

    Raises TpunbError if it is another user's, OSError if it cannot be opened or is a link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        if not owners.is_own(status):
            self.close()
            raise TpunbError(f"{path} is another user's ({owners.user_name(status.st_uid)})")

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
