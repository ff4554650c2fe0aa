"""Errors raised while a notebook is read or converted."""

from __future__ import annotations

from tpunb.utils.errors import TpunbError

COMMAND = "the command"
"""Origin of a path that the user typed on the command line."""


class NotebookError(TpunbError):
    """The notebook cannot be used as it stands."""


class NotebookNotFoundError(NotebookError):
    """The notebook file that was named does not exist."""

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

    `cell` is the number shown next to the cell, `line` the line within it (from 1).
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
