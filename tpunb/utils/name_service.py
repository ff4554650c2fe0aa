"""Connect without queries to the name service.

torch's TCPStore looks up the name of the address that it connects to, and its server the name of
each client's address, for their logs, and no option prevents it (torch 2.8, 2.9). If no name server
answers, each lookup takes 10 s, and the server serves no client meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_SETTINGS = Path("/etc/nsswitch.conf")
_DEFAULT = "dns files"
"""glibc's default, without a settings file."""


@contextlib.contextmanager
def only_hosts_file() -> Iterator[None]:
    """In this block, this process finds names and addresses in /etc/hosts only.

    Other threads find no names either; keep it short.
    """
    use_hosts_file_only()
    try:
        yield
    finally:
        restore_sources()


def use_hosts_file_only() -> None:
    """From now on, this process finds names and addresses in /etc/hosts only.

    Nothing changes where the C library is not glibc.
    """
    _configure("files")


def restore_sources() -> None:
    """From now on, this process finds names and addresses as the machine is configured."""
    _configure(_configured())


def _configure(sources: str) -> None:
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", sources.encode())


def _configured() -> str:
    """Return the sources of host names that the machine is configured for: 'files dns'."""
    with contextlib.suppress(OSError):
        for line in _SETTINGS.read_text(encoding="utf-8").splitlines():
            name, colon, sources = line.partition("#")[0].partition(":")
            if colon and name.strip() == "hosts" and sources.strip():
                return sources.strip()
    return _DEFAULT
