"""The interface of sources, and the two sources by which the user names the notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tpunb.notebook.capture.history import Execution
from tpunb.notebook.errors import NotebookError, NotebookNotFoundError
from tpunb.notebook.files import load_cells
from tpunb.utils import env_vars


class Source(Protocol):
    """One way to find the notebook of a kernel."""

    @property
    def origin(self) -> str:
        """Its name in words, such as 'VS Code'."""

    def locate(self, kernel: Kernel) -> LocatedNotebook | None:
        """The notebook, or None if this source does not know one.

        Raises UnavailableError if it should and cannot tell, where a person can do something
        about it; the next source is asked then.
        """


class UnavailableError(Exception):
    """A source should know the notebook and did not answer. The text is one line."""


@dataclass(frozen=True)
class Kernel:
    """The kernel's state that a source may use."""

    notebook: str | None
    """The path that the user gave with `%tpu_setup --notebook`."""
    environ: Mapping[str, str]
    user_ns: Mapping[str, object]
    executed: tuple[Execution, ...]
    """All that was executed, in order; the last is the cell that is running."""
    shell: object = None
    connection_file: str | None = None
    """Absolute, where there is one. Its name holds the kernel's id, if a server made it."""

    @cached_property
    def parent(self) -> Parent | None:
        """The process that started this kernel."""
        pid = self.environ.get("JPY_PARENT_PID", "")
        return Parent(int(pid)) if pid.isdecimal() else None

    def texts(self) -> set[str]:
        """The sources that were executed, without white space at their ends."""
        return {run.source.rstrip() for run in self.executed}


class Parent:
    """The process that started a kernel, as far as /proc shows it: nothing if it has ended,
    is another user's, or this is not Linux.
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
        """Whether it was started inside a kernel: the notebook of that one is not ours."""
        return "JPY_PARENT_PID" in self.environ

    def _read(self, name: str) -> list[str]:
        try:
            raw = Path("/proc", str(self.pid), name).read_bytes()
        except OSError:
            return []
        return os.fsdecode(raw).split("\0")


@dataclass(frozen=True)
class LocatedNotebook:
    """A notebook and the source that located it: an existing file, or content from a front end."""

    origin: str
    path: Path | None = None
    content: Mapping[str, Any] | None = None
    """The front end's current notebook, decoded from JSON, where there is no file."""
    title: str | None = None
    """The front end's name for it; None: the file's name."""

    @property
    def name(self) -> str:
        """A name for runs of it."""
        return self.title or (self.path.stem if self.path is not None else "notebook")


def overlap(path: Path, kernel: Kernel) -> int:
    """How many code cells of a notebook file were executed in this kernel."""
    texts = kernel.texts()
    try:
        cells = load_cells(path)
    except NotebookError:
        return 0
    return sum(cell.kind == "code" and cell.source.rstrip() in texts for cell in cells)


class Option:
    """`%tpu_setup --notebook PATH`."""

    origin = "%tpu_setup --notebook"

    def locate(self, kernel: Kernel) -> LocatedNotebook | None:
        return _file(kernel.notebook, self.origin)


class Variable:
    """The environment variable TPUNB_NOTEBOOK."""

    origin = env_vars.NOTEBOOK

    def locate(self, kernel: Kernel) -> LocatedNotebook | None:
        return _file(kernel.environ.get(env_vars.NOTEBOOK), self.origin)


def _file(name: str | None, origin: str) -> LocatedNotebook | None:
    if not name:
        return None
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise NotebookNotFoundError(name, origin)
    return LocatedNotebook(origin, path)
