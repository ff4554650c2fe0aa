"""Redirects the standard streams of a process of a run to its files."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

from tpunb.utils.errors import NO_INPUT


class _NoInput(io.TextIOWrapper):
    """The standard input of a run, which `input` and `getpass.getpass` read."""

    def readline(self, size: int = -1, /) -> NoReturn:  # type: ignore[override]
        raise EOFError(f"input() {NO_INPUT}")


def redirect_output(stdout: Path, stderr: Path) -> None:
    """Redirect this process's output to files, line by line as on a terminal.

    File descriptors 1 and 2 are replaced as well, so output of native code and child processes goes
    to these files, too. Standard input is empty.
    """
    flush_output()
    stdout.parent.mkdir(parents=True, exist_ok=True)
    _replace(0, os.open(os.devnull, os.O_RDONLY))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    _replace(1, os.open(stdout, flags, 0o600))
    _replace(2, os.open(stderr, flags, 0o600))
    # The fork server's own stream objects use the same descriptors. They are replaced unless the
    # user's code has put others in their place.
    if sys.stdin is sys.__stdin__:
        stdin = open(0, "rb", closefd=False)  # noqa: SIM115
        sys.stdin = sys.__stdin__ = _NoInput(stdin)  # type: ignore[misc]
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is getattr(sys, f"__{name}__"):
            stream = open(  # noqa: SIM115 (as long as the process)
                fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def discard_output() -> None:
    """Close the files of standard output and error, and discard further output."""
    for fd in (1, 2):
        _replace(fd, os.open(os.devnull, os.O_WRONLY))


def fill_closed() -> None:
    """Open /dev/null in place of standard streams whose descriptors a cell has closed.

    Otherwise the next file to be opened would get such a number, and redirecting a rank's output
    would replace that file.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # as standard streams are: children need them, too
    os.close(fd)


def _replace(fd: int, by: int) -> None:
    os.dup2(by, fd)
    if by != fd:
        os.close(by)


def flush_output() -> None:
    """Flush standard output and error; text that cannot be written (a closed stream) is lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream of the user's own may raise anything
            stream.flush()
