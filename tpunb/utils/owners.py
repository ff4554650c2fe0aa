"""The owner of a file or folder, and which other users can write to it.

Standard library only, because the supervisor uses it.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

_ACCESS_LIST = "system.posix_acl_access"
_HOST_PIDS = 0xEFFFFFFC
"""The inode of the PID namespace of a machine's first process; those of containers have others."""


class _Store(NamedTuple):
    """How a file system stores the owner and mode of what this user makes."""

    owner: int
    keeps_modes: bool


_stores: dict[tuple[int, int], _Store] = {}
"""By device number and user."""


def is_own(status: os.stat_result, folder: Path | str | int) -> bool:
    """True if a file or folder is this user's: it has the owner that what he makes gets there.

    Some network file systems store another owner than the user who makes a file. `folder`: where
    it is, as a path or descriptor; if the owner is another user, a file is made there for a moment.
    To root in a container, the user of the host whose folder is mounted is no other user.
    """
    if status.st_uid == os.geteuid() or _is_host_user(status.st_uid, folder):
        return True
    store = _examine(folder, status.st_dev)
    return store is not None and status.st_uid == store.owner


def is_trusted(status: os.stat_result, folder: Path | str | int) -> bool:
    """True if a file or folder is this user's or root's. `folder`: see `is_own`."""
    return status.st_uid == 0 or is_own(status, folder)


def is_shared(status: os.stat_result, folder: Path | str | int) -> bool:
    """True if other users can write to an own file or folder. `folder`: see `is_own`.

    False if the file system does not store modes: Windows' disks and some servers report that all
    can write. A group without other members, as many systems give each user, does not count.
    """
    others = stat.S_IWOTH
    if not _is_private(status) or _has_access_list(folder):
        others |= stat.S_IWGRP
    if not status.st_mode & others:
        return False
    store = _examine(folder, status.st_dev)
    return store is None or store.keeps_modes


def user_name(uid: int) -> str:
    """Return the name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_host_user(uid: int, folder: Path | str | int) -> bool:
    """True to root in a container for the user of the host whose folder is mounted there.

    He has no name in the container, and owns the whole mount: what others share is not his.
    """
    if os.geteuid() != 0 or user_name(uid) != str(uid):
        return False
    try:
        if os.stat("/proc/self/ns/pid").st_ino == _HOST_PIDS:
            return False
        where = f"/proc/self/fd/{folder}" if isinstance(folder, int) else folder
        top = Path(where).resolve(strict=True)
        device = top.stat().st_dev
        while top.parent.stat().st_dev == device and top != top.parent:
            top = top.parent
        return top != top.parent and top.stat().st_uid == uid
    except OSError:
        return False


def _is_private(status: os.stat_result) -> bool:
    """True if the group of an own file is its owner's alone, or has no other member but root."""
    try:
        group = grp.getgrgid(status.st_gid)
    except KeyError:  # in a container: the host's group for one user has the user's number
        return status.st_gid == status.st_uid
    own = user_name(os.geteuid())
    return group.gr_name == own and not {*group.gr_mem} - {own, "root"}


def _has_access_list(folder: Path | str | int) -> bool:
    """True if other users may have rights that the mode shows as those of the group."""
    with contextlib.suppress(OSError):  # the file system has none
        return bool(os.getxattr(folder, _ACCESS_LIST))
    return False


def _examine(folder: Path | str | int, device: int) -> _Store | None:
    """Make a file in a folder to see how it is stored; None if that is not possible."""
    key = device, os.geteuid()
    if key in _stores:
        return _stores[key]
    name = f".tpunb-{secrets.token_hex(8)}"
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        if isinstance(folder, int):
            where = os.dup(folder)
        else:
            where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The descriptor is of the file that was made, whatever its name leads to a moment later.
        made = os.open(name, new, 0o600, dir_fd=where)
        status = os.fstat(made)
        os.close(made)
        os.unlink(name, dir_fd=where)
    except OSError:
        return None
    finally:
        os.close(where)
    if status.st_dev != device:
        return None
    store = _Store(status.st_uid, not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    _stores[key] = store
    return store
