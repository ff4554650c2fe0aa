"""What sources look at, what they give, and what they have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tpunb.errors import NotebookError
from tpunb.notebook.files import load
from tpunb.notebook.history import Execution


class Source(Protocol):
    """One way to find the notebook of a kernel."""

    @property
    def origin(self) -> str:
        """Its name in words, such as 'VS Code'."""

    def find(self, kernel: Kernel) -> Found | None:
        """The notebook, or None if this source does not know one.

        Raises UnavailableError if it should and cannot tell, where a person can do something
        about it; the next source is asked then.
        """


class UnavailableError(Exception):
    """A source should know the notebook and did not answer. The text is one line."""


@dataclass(frozen=True)
class Kernel:
    """What a source may look at."""

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
        """What was executed, without what follows the last line."""
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
class Found:
    """A notebook, and in words how it was found: a file that exists, or what a front end sent."""

    origin: str
    path: Path | None = None
    content: Mapping[str, Any] | None = None
    """The notebook as it is in the front end now, decoded from JSON, where there is no file."""
    called: str | None = None
    """What the front end calls it; None: as its file."""

    @property
    def name(self) -> str:
        """A name for runs of it."""
        return self.called or (self.path.stem if self.path is not None else "notebook")


def overlap(path: Path, kernel: Kernel) -> int:
    """How many code cells of a notebook file were executed in this kernel."""
    texts = kernel.texts()
    try:
        cells = load(path)
    except NotebookError:
        return 0
    return sum(cell.kind == "code" and cell.source.rstrip() in texts for cell in cells)
