"""Connections without a look at the name service."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

_lock = threading.Lock()
_SETTINGS = Path("/etc/nsswitch.conf")
_DEFAULT = "dns files"
"""glibc's own, where no file says otherwise."""


@contextlib.contextmanager
def only_hosts_file() -> Iterator[None]:
    """In this block, this process finds names and addresses in /etc/hosts only.

    torch's TCPStore looks up the name of the address that it connects to, for its log, and has no
    option against it (torch 2.8, 2.9): where no name server answers, each connection takes 10 s.
    For the block, other threads find no names either; keep it short. Nothing changes where the C
    library is not glibc.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is None:
        yield
        return
    with _lock:
        configure(b"hosts", b"files")
        try:
            yield
        finally:
            configure(b"hosts", _configured().encode())


def _configured() -> str:
    """How the machine's settings say that hosts are found: 'files dns'."""
    with contextlib.suppress(OSError):
        for line in _SETTINGS.read_text(encoding="utf-8").splitlines():
            name, colon, sources = line.partition("#")[0].partition(":")
            if colon and name.strip() == "hosts" and sources.strip():
                return sources.strip()
    return _DEFAULT
