"""Names that the notebook has and a run has not, because what made them is not part of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from tpunb.script import scopes
from tpunb.script.cells import magics, plain
from tpunb.script.leaving import Lost, NotPythonError
from tpunb.script.names import Missing

_OUT = re.compile(r"--out[ =]\s*(\w+)")
_INSTEAD = {
    "it never ran": "run that cell, then the train cell again",
    "it failed": "mend that cell and run it, then the train cell again",
    "it was deleted": "put that cell back",
    "it is below": "move that cell above the train cell",
    "it is another train cell": "save it there and load it here",
    "it runs in the notebook only": "make it in a cell above, without %%tpu_debug",
}
_MARKED = "make it in a cell that is part of runs"
_LOST = "make it in plain Python"
_OR = ", or tag the cells that need it tpu-skip if runs can do without them"


def made(
    left_out: Iterable[tuple[str, str, str]], lost: Iterable[tuple[int, Lost]]
) -> dict[str, Missing]:
    """What to say of each name that is made by cells that were left out, or by lost lines.

    `left_out` are cells: what to call them, why they are left out, and their text. `lost` are
    lines of cells with these numbers.
    """
    found: dict[str, Missing] = {}
    for number, (line, name, maker) in lost:
        where = f"`{maker}` in cell [{number}], line {line},"
        found[name] = Missing(where, "which a run does not repeat", _LOST + _OR)
    for where, reason, source in left_out:
        for name in _names(source):
            why = f"which is left out because {reason}"
            found[name] = Missing(where, why, _instead(reason) + _OR)
    return found


def _instead(reason: str) -> str:
    for beginning, words in _INSTEAD.items():
        if reason.startswith(beginning):
            return words
    return _MARKED


def _names(source: str) -> set[str]:
    """The names that a cell makes, of a cell of tpunb's own magics too; none if it is broken."""
    names = set()
    lines = source.replace("\r\n", "\n").split("\n")
    if any(name.startswith("tpu_") for name in magics(source)):
        names = {name for line in lines if line.startswith("%%tpu_") for name in _OUT.findall(line)}
        lines = ["" if line.startswith("%%tpu_") else line for line in lines]
    try:
        cell = plain("\n".join(lines))
        return (
            names | {one.name for one in cell.lost} | scopes.made(ast.parse("\n".join(cell.lines)))
        )
    except (NotPythonError, SyntaxError, ValueError, MemoryError, RecursionError):
        return names
