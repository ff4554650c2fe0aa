"""Locate the notebook of this kernel; each class in `SOURCES` is one way to do so.

They are tried in order, and the first that finds the notebook wins. To support a new front end,
add a module to this package, with a class that has `origin` and `locate`, and an entry in the
table.
"""

from __future__ import annotations

from tpunb.notebook.capture.sources.base import (
    Kernel,
    LocatedNotebook,
    Option,
    Source,
    UnavailableError,
    Variable,
)
from tpunb.notebook.capture.sources.colab import Colab
from tpunb.notebook.capture.sources.jupyter import Server, SessionName
from tpunb.notebook.capture.sources.kaggle import Kaggle
from tpunb.notebook.capture.sources.runners import CommandLine, PapermillParameters
from tpunb.notebook.capture.sources.vscode import VSCode

__all__ = ["SOURCES", "Kernel", "LocatedNotebook", "Source", "locate_notebook"]

SOURCES: tuple[Source, ...] = (
    Option(),
    Variable(),
    Colab(),
    Kaggle(),
    VSCode(),
    Server(),  # correct right after a rename, unlike the variable that the next source reads
    SessionName(),
    CommandLine(),
    PapermillParameters(),
)


def locate_notebook(kernel: Kernel) -> tuple[LocatedNotebook | None, tuple[str, ...]]:
    """Return the notebook of this kernel, or None if no source finds it.

    The second value has one line for each source that should have found it but did not answer.
    Raises NotebookNotFoundError if the user named a file that does not exist.
    """
    missed: list[str] = []
    for source in SOURCES:
        try:
            located = source.locate(kernel)
        except UnavailableError as error:
            missed.append(str(error))
            continue
        if located is not None:
            return located, tuple(missed)
    return None, tuple(missed)
