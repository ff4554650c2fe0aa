"""Calls of launchers. A running `tpunb.launch` becomes the train cell, others are left out.

Statements of other cells that start runs are found in the code: a call of `tpunb.launch`, or of
a function or object of the notebook whose code calls it, also if such a function is passed as an
argument, as in `study.optimize(objective)`.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tpunb.notebook.convert.cells import parse_body, plain_python
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.statements import executed, parse_cell
from tpunb.notebook.errors import ConversionError
from tpunb.notebook.models import Cell, LaunchCall, LeftOut, Snapshot
from tpunb.notebook.scopes import (
    LAUNCHERS,
    TPUNB_LAUNCH,
    FunctionOrClass,
    Scopes,
    argument,
    bound_names,
    first_line,
    first_name,
    literal,
    scopes_of,
)

_OTHERS = (LAUNCHERS | {"torch.multiprocessing.spawn"}) - {TPUNB_LAUNCH}
_MAY_START = re.compile(r"\bnotebook_launcher\b|(?<!tpunb\.)\b(?:spawn|launch)\s*\(")


def with_call(snapshot: Snapshot, call: LaunchCall) -> Snapshot:
    """Return the snapshot in which a call of `tpunb.launch` is the train cell.

    The running cell, `snapshot.train`, is split into two cells: the statements above the statement
    with the call, and the call itself, on its line. The rest of the cell is left out. Raises
    ConversionError if the cell is not Python.
    """
    assert snapshot.train is not None
    running = snapshot.cells[snapshot.train]
    above, rest = _split(running, call.line)
    pieces = [replace(running, source=above)] if above.strip() else []
    source = "\n" * (call.line - 1) + call.source
    pieces.append(replace(running, source=source, tags=(), cwd=os.getcwd()))
    train = running.index + len(pieces) - 1
    cells = [*snapshot.cells[: running.index], *pieces, *snapshot.cells[running.index + 1 :]]
    # Nothing below the running cell is in `left_out`: its cells ran or are above the running cell.
    below = (replace(running, index=train, source=rest), LeftOut.BELOW_LAUNCH)
    return replace(
        snapshot,
        cells=tuple(replace(cell, index=index) for index, cell in enumerate(cells)),
        train=train,
        left_out=(*snapshot.left_out, below),
    )


def _split(cell: Cell, line: int) -> tuple[str, str]:
    """Split a cell's text at the statement that contains a line."""
    source = cell.source.replace("\r\n", "\n").replace("\r", "\n")
    number = cell.number or 0
    try:
        plain = plain_python(source).lines
    except NotPythonError as error:
        raise ConversionError(str(error), number, error.line) from None
    tree = parse_cell("\n".join(plain), number)
    holding = [
        node for node in tree.body if first_line(node) <= line <= (node.end_lineno or node.lineno)
    ]
    if not holding:  # the line belongs to a magic whose body is not Python
        return "", source
    # If several share a line, as in `import tpunb; tpunb.launch(train)`, the first that launches.
    names = scopes_of(tree)
    node = next((n for n in holding if _calls_launch(n, names)), holding[-1])
    # Lines above keep their original text, which may contain magics; statements on the same line
    # before the call are taken from the plain Python.
    lines, row = source.split("\n"), first_line(node) - 1
    before = plain[row].encode()[: node.col_offset].decode()
    above = [*lines[:row], before] if before.strip() else lines[:row]
    return "\n".join(above), "\n".join(lines[row:])


def _calls_launch(node: ast.AST, names: Scopes) -> bool:
    return any(
        isinstance(part, ast.Call) and names.written(part.func) == TPUNB_LAUNCH
        for part in ast.walk(node)
    )


def starts_processes(source: str, earlier: Iterable[str]) -> str:
    """Return the launcher, as it is written, with which a cell starts processes itself; '' if it
    starts none, or one.

    `earlier`: sources of the cells before it, which may have imported the launcher.
    """
    words = "launch" in source or "spawn" in source  # the pattern takes longer
    if not words or not _MAY_START.search(source):
        return ""
    scopes = scopes_of(*(parse_body(text)[0] for text in (*earlier, source)))
    for site in scopes.executed(scopes.cells[-1]):
        node = site.node
        if isinstance(node, ast.Call) and scopes.full(node.func, site.scope) in _OTHERS:
            numbers = (argument(node, name, 2) for name in ("num_processes", "nprocs"))
            alone = argument(node, "debug_single_process", 3)
            if 1 not in map(literal, (*numbers, alone)):
                return ast.unparse(node.func)
    return ""


def replace_launch(source: str, tree: ast.Module, names: Scopes, by: str) -> str:
    """Replace `tpunb.launch` by another function in a cell."""
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and names.written(node) == TPUNB_LAUNCH
        and node.lineno == node.end_lineno
    ]
    lines = [line.encode() for line in source.split("\n")]  # columns count bytes of UTF-8
    for node in sorted(uses, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        row = lines[node.lineno - 1]
        lines[node.lineno - 1] = row[: node.col_offset] + by.encode() + row[node.end_col_offset :]
    return b"\n".join(lines).decode()


def mentions_launch(source: str) -> bool:
    """Quick textual test for cells that may call `tpunb.launch`."""
    return "launch" in source


class Launching:
    """Finds a notebook's functions, classes and objects that call `tpunb.launch`."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._scopes = scopes_of(*trees)
        self._names: set[str] = set()
        self._classes: set[str] = set()
        statements = [node for tree in trees for node in tree.body]
        known = -1
        while len(self._names) > known:  # a function may call one that is defined below it
            known = len(self._names)
            for node in statements:
                self._learn(node)

    def statements(self, tree: ast.Module) -> Iterator[ast.stmt]:
        """Yield the statements at the top level of a cell that start runs."""
        for node in tree.body:
            if not isinstance(node, FunctionOrClass) and self._starts_run(node):
                yield node

    def _learn(self, node: ast.stmt) -> None:
        for part in (node, *executed(node)):
            if isinstance(part, FunctionOrClass) and self._refers(part):
                self._names.add(part.name)
                if isinstance(part, ast.ClassDef):
                    self._classes.add(part.name)
        # `run = partial(tpunb.launch, train)`, `sweep = Sweep()`, `run = lambda: …`; the value of a
        # launch itself is a result.
        assigns = isinstance(node, ast.Assign | ast.AnnAssign)
        if assigns and self._refers(node) and not self._starts_run(node):
            self._names |= bound_names(ast.Module([node], []))

    def _starts_run(self, node: ast.stmt) -> bool:
        return any(self._call_starts_run(part) for part in executed(node))

    def _call_starts_run(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Name) and node.func.id in self._classes:
            return False  # only its methods start runs
        if self._scopes.written(node.func) in ("functools.partial", "partial"):
            return False
        return self._means(node.func) or any(
            self._refers(argument) for argument in (*node.args, *(w.value for w in node.keywords))
        )

    def _means(self, node: ast.expr) -> bool:
        """True if the called object is `tpunb.launch`, or belongs to an object that calls it."""
        return self._is_launch(node) or first_name(node, calls=True) in self._names

    def _is_launch(self, node: ast.expr) -> bool:
        return self._scopes.written(node) == TPUNB_LAUNCH

    def _refers(self, node: ast.AST) -> bool:
        """True if code mentions `tpunb.launch`, or a name whose code calls it."""
        return any(
            isinstance(part, ast.Name | ast.Attribute)
            and isinstance(part.ctx, ast.Load)
            and (getattr(part, "id", "") in self._names or self._is_launch(part))
            for part in ast.walk(node)
        )
