"""Programs that run a whole notebook: papermill, nbconvert, `jupyter execute`.

They do not tell the kernel which notebook it runs, so it inspects the program that started it.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path, PurePath

from tpunb.notebook.capture.sources.base import Kernel, LocatedNotebook, overlap

RUNNERS = {
    "papermill": "papermill",
    "jupyter-nbconvert": "nbconvert",
    "nbconvert": "nbconvert",
    "jupyter-execute": "jupyter execute",
}
"""Programs that run notebooks named on their command line. `jupyter x` becomes `jupyter-x`."""


def from_command_line(kernel: Kernel) -> LocatedNotebook | None:
    """The command line of the program that started this kernel (Linux, same machine).

    If a command names several notebooks, the notebook that contains most of the executed cells
    is used.
    """
    parent = kernel.parent
    if parent is None or parent.folder is None:
        return None
    runner, rest = _runner(parent.arguments)
    if runner is None:
        return None
    # papermill --cwd changes to another folder than that in which the command was typed.
    folders = (parent.folder, Path(parent.environ.get("PWD", parent.folder)))
    words = [[path for folder in folders if (path := _notebook(folder, word))] for word in rest]
    named = [paths for paths in words if paths]
    if runner == "papermill":
        named = named[:1]  # the input; the output holds the same cells and is being written
    best = max(chain(*named), key=lambda path: overlap(path, kernel), default=None)
    if best is None or not overlap(best, kernel):
        return None
    return LocatedNotebook(f"the command line of {runner}", best)


def from_parameters(kernel: Kernel) -> LocatedNotebook | None:
    """Variables that `papermill --inject-paths` sets in the notebook, for systems without /proc.

    Paths are relative to papermill's start directory, which `%cd` does not change.
    """
    folder = (kernel.parent and kernel.parent.folder) or Path.cwd()
    for name in ("PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"):
        path = kernel.user_ns.get(name)
        if isinstance(path, str) and (folder / path).is_file():
            return LocatedNotebook(name, folder / path)
    return None


def _runner(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the program that a command line starts, if it is a runner, and its arguments.

    Only the first words are checked: the program itself, the script that an interpreter
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
    # nbconvert and `jupyter execute` accept the name without its suffix.
    path = folder / (word if word.endswith(".ipynb") else f"{word}.ipynb")
    return path if path.is_file() else None
