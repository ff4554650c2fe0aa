"""A notebook that is edited and executed without processes: in one namespace as the kernel does,
and in another as a run does, with what the run takes from the kernel.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass, field
from typing import Any

from tpunb.kernel.changes import Changes, PreludeCell
from tpunb.kernel.taken import TakenValues, take
from tpunb.utils.names_read import names_read


@dataclass
class Notebook:
    """A kernel's namespace, and the cells around a train cell."""

    train: str
    cells: dict[str, str] = field(default_factory=dict)
    """The text that each cell ran last, by the cell's name, in the order of the notebook."""
    below: frozenset[str] = frozenset()
    """Cells below the train cell."""
    kernel: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    numbers: dict[str, int] = field(default_factory=dict)
    ran: int = 0

    def __post_init__(self) -> None:
        self.changes = Changes(self.kernel)

    def run(self, name: str, source: str | None = None) -> bool:
        """Execute a cell, maybe with a new text; True if it did not fail."""
        text = textwrap.dedent(self.cells.get(name, "") if source is None else source).strip()
        self.cells[name] = text
        self.ran += 1
        self.numbers[name] = self.ran
        try:
            exec(compile(text, "<cell>", "exec"), self.kernel)
        except Exception:
            self.changes.cell_ended(text, self.ran, failed=True)
            return False
        self.changes.cell_ended(text, self.ran, failed=False)
        return True

    def run_below(self, source: str) -> None:
        """Execute a new cell below the train cell."""
        name = f"below {len(self.below)}"
        self.below |= {name}
        assert self.run(name, source)

    def above(self) -> list[str]:
        """The names of the cells above the train cell that were executed."""
        return [name for name in self.cells if name not in self.below and name in self.numbers]

    def taken(self) -> TakenValues:
        """What a run of the train cell takes from the kernel."""
        prelude = [PreludeCell(self.cells[name], self.numbers[name]) for name in self.above()]
        names = names_read(ast.parse(textwrap.dedent(self.train)), self.kernel)
        return take(self.changes, prelude, names, self.ran + 1)

    def start(self) -> tuple[TakenValues, dict[str, Any]]:
        """Run the prelude; return what is taken from the kernel, and the train cell's namespace."""
        taken = self.taken()
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for name in self.above():
            exec(compile(self.cells[name], "<script>", "exec"), namespace)
        exec("; ".join(taken.statements), namespace)
        return taken, namespace


def notebook(train: str, *cells: str) -> Notebook:
    """A notebook whose cells above the train cell have run once, in their order."""
    made = Notebook(train)
    for number, cell in enumerate(cells, 1):
        assert made.run(str(number), cell)
    return made
