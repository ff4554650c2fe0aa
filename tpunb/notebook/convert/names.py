"""Check before a run for names that its cells need but cannot have.

A run has the names that its cells define. It does not have the notebook's history (`_`, `Out[3]`),
the values that the user chose in a widget, or names that only left-out cells define. Only certain
failures are refused; others are reported when the run reaches them.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpunb.notebook.convert.cells import LostName, plain_python
from tpunb.notebook.convert.earlier_values import train_line
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.statements import (
    COMPREHENSIONS,
    Function,
    bindings,
    bound_names,
    certain_parts,
    executed,
    may_leave,
    parameters,
)
from tpunb.notebook.errors import ConversionError
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Absent, EarlierValues, LeftOut

_WORD = re.compile(r"[^\W\d]\w*")
_HISTORY = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|In|Out|_ih|_oh|_dh")
_UNKNOWN = ("exec", "globals", "locals", "vars", "builtins", "__builtins__", "__dict__")
"""Words in code that may define names in ways that static analysis cannot see."""
_STAR = re.compile(r"\bimport\s+\*|\b_tpunb_run_(file|module)\(")


class LeftOutCell(NamedTuple):
    """A cell of the notebook that is not part of the run."""

    place: int
    """Its index in the snapshot; if it is not in the snapshot, that of the cell below it."""
    label: str
    """'cell [3]'."""
    reason: LeftOut
    source: str
    got: EarlierValues = EarlierValues()
    """For a train cell: the values that the kernel has from it."""


class RunCell(NamedTuple):
    """A cell of the run in plain Python."""

    number: int
    source: str
    place: int = 0
    """The cell's index in the snapshot."""


@dataclass(frozen=True)
class MissingName:
    """Where a name is defined in the notebook, and how to make it available to the run."""

    where: str
    """'cell [3]', or '`%%capture out` in cell [3]'."""
    why: str
    """Why this place is not part of the run."""
    instead: str
    """What to do."""


def refuse_missing(
    cells: Sequence[RunCell], missing: Mapping[str, MissingName], held: Container[str] = ()
) -> None:
    """Raise ConversionError, with cell and line, for the first name that a run cannot have.

    `cells` are those of the run, in order; `missing` are names that are defined elsewhere;
    `held` are names that the last cell gets from the kernel.
    """
    words = [set(_WORD.findall(cell.source)) for cell in cells]
    every = set().union(*words)
    if defines_unseen([cell.source for cell in cells]):
        missing = {}
    wanted = {name for name in every if name in missing or _HISTORY.fullmatch(name)}
    wanted -= set(dir(builtins))
    shown = "ipywidgets" in every
    suspects = [c for c, own in zip(cells, words, strict=True) if shown or wanted & own]
    if not any(_reads_any(ast.parse(cell.source), wanted) or shown for cell in suspects):
        return
    _Run([(cell, ast.parse(cell.source)) for cell in cells]).refuse(wanted, missing, held)


def defines_unseen(sources: Sequence[str]) -> bool:
    """True if cells may define names in ways that static analysis cannot see."""
    return any(_STAR.search(source) for source in sources) or any(
        word in _UNKNOWN for source in sources for word in _WORD.findall(source)
    )


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

    def __init__(self, cells: list[tuple[RunCell, ast.Module]]) -> None:
        self.cells = cells
        self.functions: dict[str, tuple[RunCell, list[Function]]] = {}
        for cell, tree in cells:
            for node in tree.body:
                if isinstance(node, Function):
                    self.functions[node.name] = (cell, [node])
                elif isinstance(node, ast.ClassDef):
                    inits = [f for f in node.body if isinstance(f, Function) and _at_once(f)]
                    self.functions[node.name] = (cell, inits)

    def refuse(
        self, wanted: set[str], missing: Mapping[str, MissingName], held: Container[str]
    ) -> None:
        bound = [b.names | b.globals for b in (bindings(tree.body) for _, tree in self.cells)]
        everywhere = set().union(*bound)
        counted = Counter(name for names in bound for name in names)
        trees = [tree for _, tree in self.cells]
        chosen = {name: kind for name, kind in chosen_widgets(trees).items() if counted[name] == 1}
        before: set[str] = set()
        for (cell, tree), own in zip(self.cells, bound, strict=True):
            before |= own
            for place, node in self._reached(cell, tree):
                # A function may need a name that a cell below its own defines.
                known = before if place is cell else everywhere
                given = isinstance(node, ast.Name) and node.id in held
                if given and cell is self.cells[-1][0]:
                    continue
                _check(place, node, wanted, known, missing, chosen)

    def _reached(self, cell: RunCell, tree: ast.Module) -> Iterator[tuple[RunCell, ast.expr]]:
        """Yield the reads of a cell and, recursively, of the functions that it mentions."""
        entered: set[str] = set()
        todo = [(cell, node) for node in certain_reads(tree.body)]
        while todo:
            place, node = todo.pop(0)
            yield place, node
            if isinstance(node, ast.Name) and node.id not in entered and node.id in self.functions:
                entered.add(node.id)
                home, functions = self.functions[node.id]
                todo += [(home, read) for f in functions for read in reads_of_function(f)]


def _at_once(method: Function) -> bool:
    """True if a method runs when an object of its class is created."""
    return method.name in ("__init__", "__new__", "__post_init__")


def _check(
    cell: RunCell,
    node: ast.expr,
    wanted: set[str],
    known: set[str],
    missing: Mapping[str, MissingName],
    chosen: Mapping[str, str],
) -> None:
    reason = None
    if isinstance(node, ast.Attribute):
        whose = node.value.id if isinstance(node.value, ast.Name) else ""
        if whose in chosen and node.attr in WIDGET_VALUES:
            reason = (
                f"`{whose}.{node.attr}` is a value chosen in the notebook, and a run has a new "
                f"{chosen[whose]} with its initial value: assign the value itself, or put it "
                "into os.environ in a cell tagged tpu-skip, since a run has the kernel's "
                "environment"
            )
    elif isinstance(node, ast.Name) and node.id in wanted and node.id not in known:
        reason = _reason(node.id, missing)
    if reason is not None:
        line = cell.source.split("\n")[node.lineno - 1]
        raise ConversionError(reason, cell.number, node.lineno, line)


def _reason(name: str, missing: Mapping[str, MissingName]) -> str:
    if name in missing:
        maker = missing[name]
        return f"`{name}` is defined only in {maker.where}, {maker.why}: {maker.instead}"
    return (
        f"`{name}` is the notebook's own history of executed cells, which a run does not have: "
        "give the value a name in the cell that makes it, and use that name"
    )


Hidden = frozenset[str]
"""Local names of the enclosing functions, classes and comprehensions."""


def certain_reads(body: Sequence[ast.stmt], hidden: Hidden = frozenset()) -> Iterator[ast.expr]:
    """Yield names that are certainly read, and attributes of names, in source order.

    Bodies of loops are assumed to run; branches, code whose errors are handled, and statements
    below a possible exit are not. Bodies of functions only run when they are called.
    """
    for statement in body:
        yield from _reads(statement, hidden)
        if may_leave(statement, ast.Return, ast.Raise):
            return  # the statements below may not be reached


def reads_of_function(function: Function) -> Iterator[ast.expr]:
    """Yield the same for a call of a module-level function."""
    bound = bindings(function.body)
    own = (parameters(function) | bound.names | bound.changed | bound.outer) - _declared(function)
    yield from certain_reads(function.body, frozenset(own))


def _declared(function: Function) -> set[str]:
    return {
        name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names
    }


def _reads(node: ast.AST, hidden: Hidden) -> Iterator[ast.expr]:
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in hidden:
            yield node
    elif isinstance(node, ast.Attribute):
        yield from _reads(node.value, hidden)
        if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            yield from () if node.value.id in hidden else (node,)
    elif isinstance(node, COMPREHENSIONS):
        yield from _comprehension_reads(node, hidden)
    elif isinstance(node, ast.ClassDef):
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            yield from _reads(part, hidden)
        yield from certain_reads(node.body, hidden | bindings(node.body).names)
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            yield from _reads(item, hidden)
        if not any("suppress" in ast.unparse(item.context_expr) for item in node.items):
            yield from certain_reads(node.body, hidden)
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield from _reads(node.iter, hidden)
        yield from certain_reads(node.body, hidden)
    elif isinstance(node, ast.While):
        yield from _reads(node.test, hidden)
        yield from certain_reads(node.body, hidden)
    elif isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Name) and node.target.id not in hidden:
            yield node.target
        yield from _reads(node.value, hidden)
    else:
        for each in _parts(node):
            if isinstance(each, list):
                yield from certain_reads(each, hidden)
            else:
                yield from _reads(each, hidden)


def _comprehension_reads(node: ast.AST, hidden: Hidden) -> Iterator[ast.expr]:
    assert isinstance(node, COMPREHENSIONS)
    first = node.generators[0]
    yield from _reads(first.iter, hidden)
    inner = hidden | bindings([loop.target for loop in node.generators]).names
    for loop in node.generators:
        if loop is not first:
            yield from _reads(loop.iter, inner)
        if loop.ifs:
            yield from _reads(loop.ifs[0], inner)
            return
    values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    for value in values:
        yield from _reads(value, inner)


def _parts(node: ast.AST) -> Sequence[ast.AST | list[ast.stmt]]:
    """Return the parts of any other node that are certain to run with it."""
    if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":  # new in Python 3.11
        return [*([] if node.handlers else node.body), *node.finalbody]  # type: ignore[attr-defined]
    return certain_parts(node)


WIDGET_VALUES = ("value", "result", "kwargs", "index", "label", "selected_index")
"""Attributes of widgets that contain the chosen value."""

_ONLY_SHOW = (
    *("IntProgress", "FloatProgress", "HTML", "HTMLMath", "Label", "Image", "Video", "Audio"),
    *("Output", "Valid", "Box", "HBox", "VBox", "GridBox", "Layout"),
)


def chosen_widgets(trees: Sequence[ast.Module]) -> dict[str, str]:
    """Return the names and classes of ipywidgets (7.7 to 8.1) whose values the user chooses.

    Widgets whose values are set by the cells themselves are excluded.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules, classes = _ipywidgets_names(nodes)
    widgets: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            kind = _widget_kind(node.value.func, modules, classes)
            if kind and kind not in _ONLY_SHOW:
                targets = [target for target in node.targets if isinstance(target, ast.Name)]
                widgets |= {target.id: kind for target in targets}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if isinstance(node.ctx, ast.Store) and node.attr in WIDGET_VALUES:
            widgets.pop(node.value.id, None)
    return widgets


def _ipywidgets_names(nodes: Sequence[ast.AST]) -> tuple[set[str], dict[str, str]]:
    modules: set[str] = set()
    classes: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name for a in node.names if a.name == "ipywidgets"}
        elif isinstance(node, ast.ImportFrom) and node.module == "ipywidgets":
            for alias in node.names:
                if alias.name == "widgets":
                    modules.add(alias.asname or alias.name)
                else:
                    classes[alias.asname or alias.name] = alias.name
    return modules, classes


def _widget_kind(maker: ast.expr, modules: set[str], classes: dict[str, str]) -> str | None:
    if isinstance(maker, ast.Name):
        return classes.get(maker.id)
    if isinstance(maker, ast.Attribute) and isinstance(maker.value, ast.Name):
        return maker.attr if maker.value.id in modules else None
    return None


_NOTHING = {
    LeftOut.NEVER_RAN: "a train cell that never ran in this kernel",
    LeftOut.FAILED: "a train cell that failed",
    LeftOut.TRAIN_CELL: "a train cell that has not returned it in this kernel",
}
"""Why a train cell has returned nothing."""
_INSTEAD = {
    LeftOut.NEVER_RAN: "run that cell, then the train cell again",
    LeftOut.FAILED: "fix that cell and run it, then the train cell again",
    LeftOut.DELETED: "put that cell back",
    LeftOut.BELOW: "move that cell above the train cell",
    LeftOut.LAUNCH: "pass what is needed of it to the function, as in "
    "tpunb.launch(fn, args=(value,)), or save it there and load it here",
    LeftOut.BELOW_LAUNCH: "define it above that statement, or pass it to the function, as in "
    "tpunb.launch(fn, args=(value,))",
    LeftOut.DEBUG_CELL: "define it in a cell above, without %%tpu_debug",
}
_MARKED = "define it in a cell that is part of runs"
_LOST = "define it in plain Python"
_OR = ", or tag the cells that need it tpu-skip if runs can do without them"


def missing_names(
    left_out: Iterable[LeftOutCell], lost: Iterable[tuple[int, LostName]]
) -> dict[str, MissingName]:
    """Return the names that only left-out cells and lines define, with advice for each.

    `lost` are names of left-out lines, with the numbers of their cells.
    """
    missing: dict[str, MissingName] = {}
    for number, (line, name, maker) in lost:
        where = f"`{maker}` in cell [{number}], line {line}"
        missing[name] = MissingName(where, "which a run does not repeat", _LOST + _OR)
    for cell in left_out:
        absent = missing_returns(cell)
        shown = cell.reason in (LeftOut.TRAIN_CELL, LeftOut.BELOW)
        imported = imported_names(cell.source) if shown else set()
        for name in defined_names(cell.source) | absent.keys():
            if cell.reason is LeftOut.BELOW and name in missing:
                continue  # a cell above says more
            why = f"which is left out because {cell.reason}"
            instead = _INSTEAD.get(cell.reason, _MARKED)
            if name in imported:
                if cell.reason is LeftOut.TRAIN_CELL:
                    why = "a train cell, whose imports stay in its ranks"
                missing[name] = MissingName(cell.label, why, _IMPORT)
                continue
            if name in absent:
                why, instead = absent[name].why, absent[name].instead
            elif cell.reason in _NOTHING and "tpu_train" in cell_magics(cell.source):
                why = "a train cell that does not return it"
                instead = f"add `--returns {name}` to {cell.label} and run it again"
            missing[name] = MissingName(cell.label, why, instead + _OR)
    return missing


_IMPORT = "import it here too, or in a cell above"
_AGAIN = "run it, then this cell again"


def missing_returns(cell: LeftOutCell) -> dict[str, Absent]:
    """Return values that a train cell should have returned but did not, by name.

    Empty for a cell that is skipped on purpose.
    """
    if cell.reason not in _NOTHING or "tpu_train" not in cell_magics(cell.source):
        return {}
    missing = set(train_line(cell.source).names) - cell.got.names
    return dict.fromkeys(missing, Absent(_NOTHING[cell.reason], _AGAIN)) | dict(cell.got.absent)


def imported_names(source: str) -> set[str]:
    """Return the names that a cell imports outside functions; none if it is invalid."""
    lines = source.replace("\r\n", "\n").split("\n")
    try:
        cell = plain_python("\n".join("" if x.startswith("%%tpu_") else x for x in lines))
        tree = ast.parse("\n".join(cell.lines))
    except (NotPythonError, SyntaxError, ValueError, MemoryError, RecursionError):
        return set()
    nodes = executed(tree)
    return bindings(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)).names


def defined_names(source: str) -> set[str]:
    """Return the names that a cell defines, also with tpunb's magics; none if it is invalid."""
    names = set()
    lines = source.replace("\r\n", "\n").split("\n")
    if any(name.startswith("tpu_") for name in cell_magics(source)):
        names = set(train_line(source).names)
        lines = ["" if line.startswith("%%tpu_") else line for line in lines]
    try:
        cell = plain_python("\n".join(lines))
        return (
            names
            | {lost.name for lost in cell.lost}
            | bound_names(ast.parse("\n".join(cell.lines)))
        )
    except (NotPythonError, SyntaxError, ValueError, MemoryError, RecursionError):
        return names
