"""Locate the notebook of this kernel; each function in `SOURCES` is one way to do so.

They are tried in order, and the first that finds the notebook wins. To support a new front end,
add a module to this package, with such a function, and an entry in the table.
"""

from __future__ import annotations

from collections.abc import Callable

from tpunb.notebook.capture.sources.base import (
    Kernel,
    LocatedNotebook,
    UnavailableError,
    from_option,
    from_variable,
)
from tpunb.notebook.capture.sources.colab import from_colab
from tpunb.notebook.capture.sources.jupyter import from_server, from_session_name
from tpunb.notebook.capture.sources.kaggle import from_kaggle
from tpunb.notebook.capture.sources.runners import from_command_line, from_parameters
from tpunb.notebook.capture.sources.vscode import from_vscode

__all__ = ["SOURCES", "Kernel", "LocatedNotebook", "locate_notebook"]

SOURCES: tuple[Callable[[Kernel], LocatedNotebook | None], ...] = (
    from_option,
    from_variable,
    from_colab,
    from_kaggle,
    from_vscode,
    from_server,  # correct right after a rename, unlike the variable that the next source reads
    from_session_name,
    from_command_line,
    from_parameters,
)


def locate_notebook(kernel: Kernel) -> tuple[LocatedNotebook | None, tuple[str, ...]]:
    """Return the notebook of this kernel, or None if no source finds it.

    The second value has one line for each source that should have found it but did not answer.
    Raises NotebookNotFoundError if the user named a file that does not exist.
    """
    missed: list[str] = []
    for locate in SOURCES:
        try:
            located = locate(kernel)
        except UnavailableError as error:
            missed.append(str(error))
            continue
        if located is not None:
            return located, tuple(missed)
    return None, tuple(missed)
