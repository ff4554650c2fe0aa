"""The folder for temporary files of a fork server's imports.

It is removed at the supervisor's end; that of a supervisor that was killed, by its kernel or by the
next supervisor that starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from tpunb.runs import protocol
from tpunb.utils import processes

_NAME = re.compile(protocol.IMPORT_FILES.format(r"(\d+)"))


class ImportFiles:
    """The folder of this supervisor, which holds a lock on it."""

    def __init__(self) -> None:
        """Make the folder, and remove those that others have left."""
        _remove_left()
        self.name = tempfile.mkdtemp(prefix=protocol.IMPORT_FILES.format(os.getpid()))
        self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def cleanup(self) -> None:
        shutil.rmtree(self.name, ignore_errors=True)


def _remove_left() -> None:
    """Remove this user's folders whose supervisor has ended.

    The lock also tells apart supervisors in containers that share the folder for temporary files,
    but not the processes.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{protocol.IMPORT_FILES.format('*')}*"):
        match = _NAME.match(path.name)
        if match is None or processes.find_process(int(match[1])) is not None:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
