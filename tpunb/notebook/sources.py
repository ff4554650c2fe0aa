"""Where the notebook of this kernel is: each way to find out is one function in `SOURCES`.

They are asked in order and the first that knows wins. A new front end is one more function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from tpunb.errors import NotebookError, NotebookNotFoundError
from tpunb.notebook.files import load


@dataclass(frozen=True)
class Kernel:
    """What a source may look at."""

    notebook: str | None
    """The path that the user gave with `%tpu_setup --notebook`."""
    environ: Mapping[str, str]
    user_ns: Mapping[str, object]
    executed: tuple[str, ...]
    """The texts of all executed cells, in order."""


@dataclass(frozen=True)
class Found:
    """A notebook file that exists, and in words how it was found."""

    path: Path
    origin: str


def find(kernel: Kernel) -> Found | None:
    """The notebook file of this kernel, or None if no source knows it.

    Raises NotebookNotFoundError if the user named a file that does not exist.
    """
    return next((found for source in SOURCES if (found := source(kernel))), None)


def option(kernel: Kernel) -> Found | None:
    """`%tpu_setup --notebook PATH`."""
    return _named_by_user(kernel.notebook, "%tpu_setup --notebook")


def variable(kernel: Kernel) -> Found | None:
    """The environment variable TPUNB_NOTEBOOK."""
    return _named_by_user(kernel.environ.get("TPUNB_NOTEBOOK"), "TPUNB_NOTEBOOK")


def session(kernel: Kernel) -> Found | None:
    """JPY_SESSION_NAME: the absolute path, from Jupyter servers (Lab 4, Notebook 7).

    Stale after a rename until the kernel restarts, and a bare name on old servers.
    """
    path = Path(kernel.environ.get("JPY_SESSION_NAME", ""))
    return Found(path, "JPY_SESSION_NAME") if path.is_absolute() and path.is_file() else None


def command_line(kernel: Kernel) -> Found | None:
    """The command line of the program that started this kernel (Linux, same machine).

    papermill, `jupyter nbconvert --execute` and `jupyter execute` tell a kernel nothing
    else. Where a command names several notebooks, it is the one that holds the most of the
    cells that were executed.
    """
    process = _parent(kernel)
    try:
        raw = (process / "cmdline").read_bytes() if process else b""
        folder = (process / "cwd").readlink() if process else Path()
    except OSError:  # the runner has ended, belongs to another user, or this is not Linux
        return None
    arguments = os.fsdecode(raw).split("\0")
    runner, rest = _runner(arguments)
    if runner is None:
        return None
    named = [path for word in rest if (path := _notebook(folder, word))]
    if runner == "papermill":
        named = named[:1]  # the input; the output holds the same cells and is being written
    texts = {source.rstrip() for source in kernel.executed}
    best = max(named, key=lambda path: _overlap(path, texts), default=None)
    if best is None or not _overlap(best, texts):
        return None
    return Found(best, f"the command line of {runner}")


def papermill_parameters(kernel: Kernel) -> Found | None:
    """What `papermill --inject-paths` leaves in the notebook, where there is no /proc.

    Paths are relative to where papermill was started, which `%cd` does not change.
    """
    process = _parent(kernel)
    try:
        folder = (process / "cwd").readlink() if process else Path.cwd()
    except OSError:
        folder = Path.cwd()
    for name in ("PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"):
        path = kernel.user_ns.get(name)
        if isinstance(path, str) and (folder / path).is_file():
            return Found(folder / path, name)
    return None


SOURCES: tuple[Callable[[Kernel], Found | None], ...] = (
    option,
    variable,
    session,
    command_line,
    papermill_parameters,
)

RUNNERS = {
    "papermill": "papermill",
    "jupyter-nbconvert": "nbconvert",
    "nbconvert": "nbconvert",
    "jupyter-execute": "jupyter execute",
}
"""Programs that run notebooks named on their command line. `jupyter x` becomes `jupyter-x`."""


def _named_by_user(name: str | None, origin: str) -> Found | None:
    if not name:
        return None
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise NotebookNotFoundError(name, origin)
    return Found(path, origin)


def _parent(kernel: Kernel) -> Path | None:
    pid = kernel.environ.get("JPY_PARENT_PID", "")
    return Path("/proc", pid) if pid.isdecimal() else None


def _runner(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The program that a command line starts, if it is a runner, and what follows its name.

    Only its first words are looked at: the program itself, the script that an interpreter
    runs, the module after `-m`, and the word after `jupyter`.
    """
    for index, word in enumerate(arguments[:4]):
        name = PurePath(word).name
        if name == "jupyter":
            name = f"jupyter-{arguments[index + 1]}" if arguments[index + 1 :] else name
        if name in RUNNERS:
            return RUNNERS[name], arguments[index + 1 :]
    return None, []


def _notebook(folder: Path, word: str) -> Path | None:
    if not word or word.startswith("-"):
        return None
    # nbconvert and `jupyter execute` accept the name without its ending.
    path = folder / (word if word.endswith(".ipynb") else f"{word}.ipynb")
    return path if path.is_file() else None


def _overlap(path: Path, texts: set[str]) -> int:
    try:
        cells = load(path)
    except NotebookError:
        return 0
    return sum(cell.kind == "code" and cell.source.rstrip() in texts for cell in cells)
