"""What the sources share, and the two sources with which the user names the notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tpunb.notebook.capture.history import Execution
from tpunb.notebook.errors import NotebookError, NotebookNotFoundError
from tpunb.notebook.files import load_cells
from tpunb.utils import env_vars


class UnavailableError(Exception):
    """A source should know the notebook but did not answer, and the user can do something about it.

    The message is one line. The next source is tried.
    """


@dataclass(frozen=True)
class Kernel:
    """State of the kernel that sources may use."""

    notebook: str | None
    """The path that the user gave with `%tpu_setup --notebook`."""
    environ: Mapping[str, str]
    user_ns: Mapping[str, object]
    executed: tuple[Execution, ...]
    """All executions in order; the last is the running cell."""
    shell: object = None
    connection_file: str | None = None
    """Absolute path, if there is one. Its name contains the kernel's id if a server made it."""

    @cached_property
    def parent(self) -> Parent | None:
        """The process that started this kernel."""
        pid = self.environ.get("JPY_PARENT_PID", "")
        return Parent(int(pid)) if pid.isdecimal() else None

    def texts(self) -> set[str]:
        """The executed texts, without trailing white space."""
        return {run.source.rstrip() for run in self.executed}


class Parent:
    """The process that started a kernel, as shown by /proc: empty if the process has ended,
    belongs to another user, or this is not Linux.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @cached_property
    def arguments(self) -> list[str]:
        """Its command line; empty if it cannot be read."""
        return self._read("cmdline")

    @cached_property
    def environ(self) -> dict[str, str]:
        """The environment that it was started with."""
        pairs = (entry.partition("=") for entry in self._read("environ"))
        return {name: value for name, _, value in pairs}

    @cached_property
    def folder(self) -> Path | None:
        """Its working directory."""
        try:
            return Path("/proc", str(self.pid), "cwd").readlink()
        except OSError:
            return None

    def in_a_kernel(self) -> bool:
        """True if it was itself started in a kernel, whose notebook is not this kernel's."""
        return "JPY_PARENT_PID" in self.environ

    def _read(self, name: str) -> list[str]:
        try:
            raw = Path("/proc", str(self.pid), name).read_bytes()
        except OSError:
            return []
        return os.fsdecode(raw).split("\0")


@dataclass(frozen=True)
class LocatedNotebook:
    """A located notebook: an existing file, or content sent by a front end."""

    origin: str
    path: Path | None = None
    content: Mapping[str, Any] | None = None
    """The front end's current notebook, decoded from JSON, if there is no file."""
    title: str | None = None
    """The front end's name for it; None to use the file's name."""

    @property
    def name(self) -> str:
        """Name for runs of the notebook."""
        return self.title or (self.path.stem if self.path is not None else "notebook")


def overlap(path: Path, kernel: Kernel) -> int:
    """Number of code cells of a notebook file that were executed in this kernel."""
    texts = kernel.texts()
    try:
        cells = load_cells(path)
    except NotebookError:
        return 0
    return sum(cell.kind == "code" and cell.source.rstrip() in texts for cell in cells)


def from_option(kernel: Kernel) -> LocatedNotebook | None:
    """`%tpu_setup --notebook PATH`."""
    return _file(kernel.notebook, "%tpu_setup --notebook")


def from_variable(kernel: Kernel) -> LocatedNotebook | None:
    """The environment variable TPUNB_NOTEBOOK."""
    return _file(kernel.environ.get(env_vars.NOTEBOOK), env_vars.NOTEBOOK)


def _file(name: str | None, origin: str) -> LocatedNotebook | None:
    if not name:
        return None
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise NotebookNotFoundError(name, origin)
    return LocatedNotebook(origin, path)
