"""Find changes by left-out cells to names that the run reads: reported, not refused.

The run has such a name with the value that a cell above gave it: a train cell should have returned
it but did not, or a call of `tpunb.launch` changed it. Other differences from the kernel are found
when a run begins (`tpunb.kernel.changes`).
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Sequence

from tpunb.notebook.convert.cells import plain_python
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.names import LeftOutCell, RunCell, missing_returns
from tpunb.notebook.convert.statements import (
    Function,
    FunctionOrClass,
    bindings,
    bound_names,
    executed,
    first_name,
    parameters,
)
from tpunb.notebook.models import Absent, LeftOut, MissingChange

IN_PLACE = {
    *("load_state_dict", "load_weights", "append", "extend", "insert", "remove", "pop", "popitem"),
    *("clear", "update", "setdefault", "add", "discard", "sort", "reverse", "fit", "partial_fit"),
    *("register_buffer", "register_parameter", "add_module", "set_params", "merge_"),
}
"""Methods that change their object, in addition to those that end with `_`, as torch's do."""


def find_missing_changes(
    pieces: Sequence[RunCell], left_out: Iterable[LeftOutCell], held: Container[str] = ()
) -> list[MissingChange]:
    """Return one entry for each name and cell, in the order of the cells.

    `pieces` end with the train cell, which gets the names in `held` from the kernel.
    """
    gaps = [(cell, gone) for cell in left_out if (gone := dict(_gone(cell)))]
    if not gaps or not pieces:
        return []
    trees = [ast.parse(piece.source) for piece in pieces]
    reads = _Reads(trees)
    found = []
    for cell, gone in sorted(gaps, key=lambda gap: gap[0].place):
        below = sum(piece.place < cell.place for piece in pieces)
        above = set().union(*map(bound_names, trees[:below]))
        for name in sorted(gone.keys() & above):
            reader = reads.first(name, below)
            if reader is not None:
                last = reader == len(pieces) - 1
                if last and name in held:
                    continue
                who = "the train cell" if last else f"cell [{pieces[reader].number}]"
                found.append(MissingChange(name, cell.label, who, gone[name]))
    return found


def _gone(cell: LeftOutCell) -> Iterator[tuple[str, Absent | None]]:
    if cell.reason is LeftOut.LAUNCH:
        yield from ((name, None) for name in changed_names(cell.source) - cell.got.names)
    else:
        yield from missing_returns(cell).items()


def changed_names(source: str) -> set[str]:
    """Return names that a cell assigns, or whose objects it changes; none if it is invalid.

    Imports do not count, because importing again gives the same object.
    """
    try:
        lines = source.split("\n")
        plain = plain_python("\n".join("" if x.startswith("%%tpu_") else x for x in lines))
        tree = ast.parse("\n".join(plain.lines))
    except (NotPythonError, SyntaxError, ValueError, MemoryError, RecursionError):
        return set()
    bound = bindings(tree.body)
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    names = (bound.names | bound.changed) - imported
    for node in executed(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            names.add(first_name(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            own = not method.startswith("_") and method.endswith("_")
            if own or method in IN_PLACE or _in_place_argument(node):
                names.add(first_name(node.func))
    return {name for name in names if name and not name.startswith("_")}


def _in_place_argument(call: ast.Call) -> bool:
    """True if a call has `inplace=True`, an option of pandas."""
    return any(
        word.arg == "inplace" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in call.keywords
    )


class _Reads:
    """Finds the names that each cell reads, directly or through functions that it mentions."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._trees = trees
        self._functions: dict[str, set[str]] = {}
        for tree in trees:
            for node in tree.body:
                if isinstance(node, FunctionOrClass):
                    self._functions[node.name] = _free(node)

    def first(self, name: str, begin: int) -> int | None:
        """Return the first tree from `begin` on that reads a name before it is bound again."""
        for index in range(begin, len(self._trees)):
            if self._reads(self._trees[index], name):
                return index
            if name in bound_names(self._trees[index]):
                return None
        return None

    def _reads(self, tree: ast.Module, name: str) -> bool:
        bound = set[str]()
        for statement in tree.body:
            read = _loads(statement) if not isinstance(statement, FunctionOrClass) else set()
            if name in self._with_functions(read) - bound:
                return True
            bound |= bound_names(ast.Module(body=[statement], type_ignores=[]))
        return False

    def _with_functions(self, names: set[str]) -> set[str]:
        every: set[str] = set()
        todo = set(names)
        while todo:
            every |= todo
            todo = set().union(*(self._functions.get(name, set()) for name in todo)) - every
        return every


def _loads(node: ast.AST) -> set[str]:
    """Return names that a statement reads when it runs; `x += 1` reads x as well."""
    nodes = [node, *executed(node)]
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for part in nodes:
        if isinstance(part, ast.Lambda):
            names |= _free(part)
        elif isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            names.add(part.target.id)
    return names


def _free(node: ast.AST) -> set[str]:
    """Return names that a function, or the methods of a class, read from the enclosing scope."""
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    if isinstance(node, Function):
        read -= (bindings(node.body).names | parameters(node)) - _declared(node)
    return read


def _declared(function: ast.AST) -> set[str]:
    return {n for node in ast.walk(function) if isinstance(node, ast.Global) for n in node.names}
