"""Errors of reading and converting a notebook."""

from __future__ import annotations

from tpunb.utils.errors import TpunbError

COMMAND = "the command"
"""Where a path comes from that somebody has just typed."""


class NotebookError(TpunbError):
    """The notebook cannot be used as it stands."""


class NotebookNotFoundError(NotebookError):
    """No file was found behind a name that was given."""

    def __init__(self, path: str, origin: str) -> None:
        super().__init__(path, origin)
        self.path = path
        self.origin = origin

    def __str__(self) -> str:
        if self.origin == COMMAND:
            return f"there is no notebook {self.path!r}"
        return (
            f"there is no notebook {self.path!r} (named by {self.origin}). "
            "Name the file with `%tpu_setup --notebook PATH` or the variable TPUNB_NOTEBOOK."
        )


class ConversionError(TpunbError):
    """A cell cannot become part of a Python script.

    `cell` is the number a person sees beside the cell, `line` the line within it (from 1).
    """

    def __init__(
        self, reason: str, cell: int | None = None, line: int | None = None, source: str = ""
    ) -> None:
        super().__init__(reason, cell, line, source)
        self.reason = reason
        self.cell = cell
        self.line = line
        self.source = source

    def __str__(self) -> str:
        place = "the notebook" if self.cell is None else f"cell [{self.cell}]"
        if self.line is not None:
            place += f", line {self.line}"
        shown = f"\n    {self.source.strip()}" if self.source.strip() else ""
        return f"{place}: {self.reason}{shown}"
