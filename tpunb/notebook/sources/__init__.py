"""Where the notebook of this kernel is: each way to find out is one class in `SOURCES`.

They are asked in order and the first that knows wins. A new front end is one more module here,
with a class that has an `origin` and a `find`, and its place in the table.
"""

from __future__ import annotations

from tpunb.notebook.sources.base import Found, Kernel, Source, UnavailableError
from tpunb.notebook.sources.colab import Colab
from tpunb.notebook.sources.jupyter import Server, SessionName
from tpunb.notebook.sources.kaggle import Kaggle
from tpunb.notebook.sources.named import Option, Variable
from tpunb.notebook.sources.runners import CommandLine, PapermillParameters
from tpunb.notebook.sources.vscode import VSCode

__all__ = ["SOURCES", "Found", "Kernel", "Source", "find"]

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


def find(kernel: Kernel) -> tuple[Found | None, tuple[str, ...]]:
    """The notebook of this kernel, or None if no source knows it.

    With it, one line for each source that should have known and did not answer. Raises
    NotebookNotFoundError if the user named a file that does not exist.
    """
    missed: list[str] = []
    for source in SOURCES:
        try:
            found = source.find(kernel)
        except UnavailableError as error:
            missed.append(str(error))
            continue
        if found is not None:
            return found, tuple(missed)
    return None, tuple(missed)
