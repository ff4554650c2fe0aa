"""Check before a run that its cells assign the names given to `--returns`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable

from tpunb.notebook.convert.magics import RUN_NOTEBOOK
from tpunb.notebook.convert.names import RunCell, RunCells, defines_unseen
from tpunb.notebook.models import Script


def refusal(script: Script, names: Iterable[str], held: Container[str]) -> str | None:
    """Return an error message for the names to return; None if all may exist at the run's end.

    `held` are names that the run gets from the kernel. Only a name that is certainly not assigned
    is refused: not if code defines names invisibly (`exec`, `import *`), and not if a left-out
    line mentions the name.
    """
    if not (names := [*names]):
        return None
    blocks = [block for block in script.blocks if block.cell is not None]
    sources = [script.source(block).removesuffix("\n") for block in blocks]
    if defines_unseen(sources) or any(f"{RUN_NOTEBOOK}(" in source for source in sources):
        return None
    scopes = RunCells([RunCell(0, source) for source in sources]).scopes
    bound = set().union(*map(scopes.bound, scopes.cells))
    left_out = {word for o in script.omissions for word in re.findall(r"\w+", o.text)}
    for name in names:
        if name not in bound and name not in held and name not in left_out:
            nearest = difflib.get_close_matches(name, sorted(bound), 1, 0.7)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            return f"{name}: neither the train cell nor a cell above it assigns {name!r}{hint}"
    return None
