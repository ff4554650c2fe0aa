"""Connections without a look at the name service.

torch's TCPStore looks up the name of the address that it connects to, and its server that of each
address from which somebody connects, for their logs and with no option against it (torch 2.8, 2.9).
Where no name server answers, each takes 10 s, and while the server waits it serves nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_SETTINGS = Path("/etc/nsswitch.conf")
_DEFAULT = "dns files"
"""glibc's own, where no file says otherwise."""


@contextlib.contextmanager
def only_hosts_file() -> Iterator[None]:
    """In this block, this process finds names and addresses in /etc/hosts only.

    Other threads find no names either; keep it short.
    """
    look_in_hosts_file()
    try:
        yield
    finally:
        look_as_configured()


def look_in_hosts_file() -> None:
    """From now on, this process finds names and addresses in /etc/hosts only.

    Nothing changes where the C library is not glibc.
    """
    _configure("files")


def look_as_configured() -> None:
    """This process finds names and addresses as the machine's settings say."""
    _configure(_configured())


def _configure(sources: str) -> None:
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", sources.encode())


def _configured() -> str:
    """How the machine's settings say that hosts are found: 'files dns'."""
    with contextlib.suppress(OSError):
        for line in _SETTINGS.read_text(encoding="utf-8").splitlines():
            name, colon, sources = line.partition("#")[0].partition(":")
            if colon and name.strip() == "hosts" and sources.strip():
                return sources.strip()
    return _DEFAULT
