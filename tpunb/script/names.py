"""Names that a cell needs and that a run cannot have, found before anything starts.

A run has what the cells make that are part of it. It has not the notebook's history (`_`,
`Out[3]`), what a person chose in a widget, and names that are made only by cells that are left
out. Only what is certain to fail is refused; the rest fails when it runs, and says so then.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpunb.errors import ConversionError
from tpunb.script import reads, scopes, widgets
from tpunb.script.statements import Function

_WORD = re.compile(r"[^\W\d]\w*")
_HISTORY = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|In|Out|_ih|_oh|_dh")
_UNKNOWN = ("exec", "globals", "locals", "vars", "builtins", "__builtins__", "__dict__")
"""Words of code that may make names which reading does not show."""
_STAR = re.compile(r"\bimport\s+\*|\b_run_(file|module)\(")


class Piece(NamedTuple):
    """A cell of the run, in plain Python."""

    number: int
    source: str


@dataclass(frozen=True)
class Missing:
    """Where a name is made in the notebook, and how the run could have it."""

    where: str
    """'cell [3]', or '`%%capture out` in cell [3]'."""
    why: str
    """Why that is not part of the run."""
    instead: str
    """What to do."""


def refuse(cells: Sequence[Piece], missing: Mapping[str, Missing]) -> None:
    """Raise ConversionError, with cell and line, for the first name that a run cannot have.

    `cells` are those of the run, in order; `missing` the names that are made elsewhere.
    """
    words = [set(_WORD.findall(cell.source)) for cell in cells]
    every = set().union(*words)
    if any(word in every for word in _UNKNOWN) or any(_STAR.search(c.source) for c in cells):
        missing = {}
    wanted = {name for name in every if name in missing or _HISTORY.fullmatch(name)}
    wanted -= set(dir(builtins))
    shown = "ipywidgets" in every
    suspects = [c for c, own in zip(cells, words, strict=True) if shown or wanted & own]
    if not any(_reads_any(ast.parse(cell.source), wanted) or shown for cell in suspects):
        return
    _Run([(cell, ast.parse(cell.source)) for cell in cells]).refuse(wanted, missing)


def _reads_any(tree: ast.Module, names: set[str]) -> bool:
    reading = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)
    }
    changed = (node.target for node in ast.walk(tree) if isinstance(node, ast.AugAssign))
    reading |= {target.id for target in changed if isinstance(target, ast.Name)}
    return bool(reading & names)


class _Run:
    """The cells of a run, and the functions that they define."""

    def __init__(self, cells: list[tuple[Piece, ast.Module]]) -> None:
        self.cells = cells
        self.functions: dict[str, tuple[Piece, list[Function]]] = {}
        for cell, tree in cells:
            for node in tree.body:
                if isinstance(node, Function):
                    self.functions[node.name] = (cell, [node])
                elif isinstance(node, ast.ClassDef):
                    inits = [f for f in node.body if isinstance(f, Function) and _at_once(f)]
                    self.functions[node.name] = (cell, inits)

    def refuse(self, wanted: set[str], missing: Mapping[str, Missing]) -> None:
        stores = [scopes.stores(tree.body) for _, tree in self.cells]
        made = [one.names | one.globals for one in stores]
        everywhere = set().union(*made)
        counted = Counter(name for names in made for name in names)
        trees = [tree for _, tree in self.cells]
        chosen = {name: kind for name, kind in widgets.made(trees).items() if counted[name] == 1}
        before: set[str] = set()
        for (cell, tree), own in zip(self.cells, made, strict=True):
            before |= own
            for place, node in self._reached(cell, tree):
                # A function may need a name that a cell below its own makes.
                known = before if place is cell else everywhere
                _check(place, node, wanted, known, missing, chosen)

    def _reached(self, cell: Piece, tree: ast.Module) -> Iterator[tuple[Piece, ast.expr]]:
        """What a cell reads, and what the functions read that it names, one through the other."""
        entered: set[str] = set()
        todo = [(cell, node) for node in reads.certain(tree.body)]
        while todo:
            place, node = todo.pop(0)
            yield place, node
            if isinstance(node, ast.Name) and node.id not in entered and node.id in self.functions:
                entered.add(node.id)
                home, functions = self.functions[node.id]
                todo += [(home, one) for f in functions for one in reads.in_function(f)]


def _at_once(method: Function) -> bool:
    """Whether it runs when an object of its class is made."""
    return method.name in ("__init__", "__new__", "__post_init__")


def _check(
    cell: Piece, node: ast.expr, wanted: set[str], known: set[str],
    missing: Mapping[str, Missing], chosen: Mapping[str, str],
) -> None:  # fmt: skip
    reason = None
    if isinstance(node, ast.Attribute):
        whose = node.value.id if isinstance(node.value, ast.Name) else ""
        if whose in chosen and node.attr in widgets.VALUES:
            reason = (
                f"`{whose}.{node.attr}` is what a person chose in the notebook, and a run has a "
                f"new {chosen[whose]} that nobody has touched: assign the value itself, or put it "
                "into os.environ in a cell tagged tpu-skip, since a run has the kernel's "
                "environment"
            )
    elif isinstance(node, ast.Name) and node.id in wanted and node.id not in known:
        reason = _reason(node.id, missing)
    if reason is not None:
        line = cell.source.split("\n")[node.lineno - 1]
        raise ConversionError(reason, cell.number, node.lineno, line)


def _reason(name: str, missing: Mapping[str, Missing]) -> str:
    if name in missing:
        made = missing[name]
        return f"`{name}` is made by {made.where} only, {made.why}: {made.instead}"
    return (
        f"`{name}` is the notebook's own record of what was run there, which a run does not have: "
        "give the value a name in the cell that makes it, and use that name"
    )
