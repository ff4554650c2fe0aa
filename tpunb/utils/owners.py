"""Whose a file or folder is: the one rule by which tpunb decides what it reads and writes.

Standard library only, because the supervisor uses it.
"""

from __future__ import annotations

import os
import pwd


def is_own(status: os.stat_result) -> bool:
    """True if a file or folder is this user's."""
    return status.st_uid == os.geteuid()


def is_trusted(status: os.stat_result) -> bool:
    """True if a file or folder is this user's or root's."""
    return status.st_uid == 0 or is_own(status)


def user_name(uid: int) -> str:
    """Return the name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
