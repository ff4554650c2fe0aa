"""Locate the notebook of this kernel: each way to do so is one class in `SOURCES`.

They are asked in order and the first that knows wins. A new front end is one more module here,
with a class that has an `origin` and a `locate`, and its place in the table.
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
    Server(),  # right at once after a rename, which the variable of the next one is not
    SessionName(),
    CommandLine(),
    PapermillParameters(),
)


def locate_notebook(kernel: Kernel) -> tuple[LocatedNotebook | None, tuple[str, ...]]:
    """The notebook of this kernel, or None if no source knows it.

    With it, one line for each source that should have known and did not answer. Raises
    NotebookNotFoundError if the user named a file that does not exist.
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
