"""Parses code cells for lint, and walks their trees once to collect the nodes that rules need.

The walk is not recursive, because expressions may be nested deeper than Python's own stack.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tpunb.notebook.convert.cells import SKIP_LINE, SKIP_TAGS, plain_python
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.statements import Function
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Cell, Snapshot

DEBUG = re.compile(r"^%%tpu_debug\b", re.MULTILINE)

Part = Literal["prelude", "train", "kernel"]


class Problem(NamedTuple):
    """The reason why a cell is not Python."""

    line: int
    reason: str
    kernel_runs_it: bool = False
    """True for special syntax that IPython runs but a script cannot contain."""


@dataclass
class ParsedCell:
    """One code cell as plain Python, and the part of the notebook that it belongs to."""

    index: int
    """Position in the snapshot."""
    number: int
    """The number shown next to the cell."""
    part: Part
    """`prelude`: runs once, above a train cell; `train`: runs on every core; `kernel`: runs in the
    notebook only. Without a train cell all are `prelude`, and the kernel runs them."""
    runs: bool
    """True if it is part of the run of the snapshot's own train cell."""
    lines: list[str]
    """The cell as it was written."""
    tree: ast.Module
    """Empty if the cell is not Python."""
    left_out: list[int]
    """Lines (from 1) with magics and shell commands that are not Python."""
    plain: list[str] = field(default_factory=list)
    """The cell as Python, line for line."""
    problem: Problem | None = None
    """None if the cell is Python."""

    def commands(self) -> Iterator[tuple[int, str]]:
        """Yield the line and text of each shell command and magic; `%%bash` cells line by line."""
        for first in self.left_out:
            if self.lines[first - 1].startswith("%%"):
                yield from enumerate(self.lines[first - 1 :], first)
                return
            at = first
            while at <= len(self.lines):
                yield at, self.lines[at - 1]
                if not self.lines[at - 1].endswith("\\"):
                    break
                at += 1


def parse_cells(snapshot: Snapshot) -> list[ParsedCell]:
    """Parse the code cells of a snapshot, in order."""
    parsed = []
    code = [cell for cell in snapshot.cells if cell.kind == "code"]
    heads = {cell.index: cell_magics(cell.source) for cell in code if "%%" in cell.source}
    trains = {index for index, names in heads.items() if "tpu_train" in names}
    if snapshot.train is not None:
        trains.add(snapshot.train)
    last = max(trains, default=None)
    for position, cell in enumerate(code, 1):
        names = heads.get(cell.index, [])
        part: Part = "prelude"
        if cell.index in trains:
            part = "train"
        elif _skipped(cell, names) or (last is not None and cell.index > last):
            part = "kernel"
        end = snapshot.train
        runs = end is not None and (cell.index == end or (part == "prelude" and cell.index < end))
        number = position if cell.number is None else cell.number
        parsed.append(_parse_cell(cell, number, part, runs))
    return parsed


def _skipped(cell: Cell, names: list[str]) -> bool:
    first = cell.source.lstrip().partition("\n")[0].strip()
    return bool(SKIP_TAGS.keys() & set(cell.tags)) or first == SKIP_LINE or "tpu_debug" in names


def _parse_cell(cell: Cell, number: int, part: Part, runs: bool) -> ParsedCell:
    source = cell.source.replace("\r\n", "\n").replace("\r", "\n")
    parsed = ParsedCell(
        cell.index, number, part, runs, source.split("\n"), ast.Module(body=[], type_ignores=[]), []
    )
    try:
        # The body of a %%tpu_debug cell is ordinary code too, though never part of a script.
        plain = plain_python(DEBUG.sub("%%tpu_train", source, count=1))
    except NotPythonError as error:
        parsed.problem = Problem(error.line, error.reason, kernel_runs_it=True)
        return parsed
    parsed.left_out = sorted(line for line, _, _ in plain.left_out)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warned about the cells when they ran
            parsed.tree = ast.parse("\n".join(plain.lines))
        parsed.plain = list(plain.lines)
    except SyntaxError as error:
        line = min(max(error.lineno or 1, 1), len(parsed.lines))
        parsed.problem = Problem(line, f"it is not Python: {error.msg}")
    except (ValueError, MemoryError, RecursionError, OverflowError) as error:
        parsed.problem = Problem(1, f"Python cannot read it: {error}")
    return parsed


LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Frame:
    """The surroundings of a node: the field `part` (a block or a condition) of `node`."""

    __slots__ = ("cell", "function", "node", "parent", "part")

    def __init__(
        self,
        cell: ParsedCell,
        node: ast.AST,
        part: str,
        parent: Frame | None,
        function: DefinedFunction | None,
    ) -> None:
        self.cell = cell
        self.node = node
        self.part = part
        self.parent = parent
        self.function = function
        """The innermost function; None at the top level of a cell."""

    def outward(self) -> Iterator[Frame]:
        """Yield this frame and those around it, up to that of the function or the cell."""
        frame: Frame | None = self
        while frame is not None and frame.function is self.function:
            yield frame
            frame = frame.parent


class Site:
    """A node with its frame."""

    __slots__ = ("frame", "node")

    def __init__(self, node: ast.AST, frame: Frame) -> None:
        self.node = node
        self.frame = frame

    @property
    def cell(self) -> ParsedCell:
        return self.frame.cell

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)

    def loop(self) -> Frame | None:
        """Return the innermost loop of the same function whose body contains this node."""
        for frame in self.frame.outward():
            if isinstance(frame.node, LOOPS) and frame.part == "body":
                return frame
        return None

    def conditions(self, up_to: Frame | None = None) -> Iterator[tuple[ast.expr, bool]]:
        """Yield the conditions on which this node depends, the innermost first, each with whether
        it must hold (False in an `else`). Within the same function, or up to the frame `up_to`.
        """
        for frame in self.frame.outward():
            if frame is up_to:
                return
            node = frame.node
            if isinstance(node, ast.If | ast.IfExp | ast.While) and frame.part != "test":
                yield node.test, frame.part == "body"
            elif isinstance(node, ast.BoolOp):
                at = int(frame.part)
                for value in node.values[:at]:
                    yield value, isinstance(node.op, ast.And)

    def simple(self) -> bool:
        """Whether the node runs whenever its function or cell does: no condition, loop or try."""
        return all(
            isinstance(frame.node, ast.Module | ast.ClassDef | Function)
            for frame in self.frame.outward()
        )


Todo = list[tuple[ast.AST, Frame]]


@dataclass(eq=False)
class DefinedFunction:
    """A function, a method or a lambda of the notebook."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    outer: Frame
    """The frame in which it is defined."""
    parameters: list[str]
    locals: set[str] = field(default_factory=set)
    """Its parameters and the names that it assigns; imported names are not included."""
    stored: set[str] = field(default_factory=set)
    """The names that it assigns."""
    calls: list[Site] = field(default_factory=list)
    loads: set[str] = field(default_factory=set)

    @property
    def method_of(self) -> ast.ClassDef | None:
        return self.outer.node if isinstance(self.outer.node, ast.ClassDef) else None


Place = tuple[ast.AST, Frame]
"""A node and its frame. A Site is only made when a rule needs it, which is seldom."""


class Sites:
    """The nodes of a notebook by kind, in order."""

    def __init__(self) -> None:
        self.calls: list[Site] = []
        self.imports: list[Site] = []
        self.assigns: list[Site] = []
        self.loops: list[Site] = []
        self.jumps: list[Site] = []
        self.subscripts: list[Site] = []
        self.leaves: list[Site] = []
        """`return` and `raise`."""
        self.classes: list[Site] = []
        self.functions: list[DefinedFunction] = []
        self.stored: set[str] = set()
        """Names that are assigned anywhere."""
        self._loads: dict[str, list[Place]] = {}
        self._attributes: dict[str, list[Place]] = {}
        self._kept: dict[type, Callable[[Site], None]] = {
            ast.Call: self.calls.append,
            ast.Import: self.imports.append,
            ast.ImportFrom: self.imports.append,
            ast.Assign: self.assigns.append,
            ast.AnnAssign: self.assigns.append,
            ast.NamedExpr: self.assigns.append,
            ast.For: self.loops.append,
            ast.AsyncFor: self.loops.append,
            ast.While: self.loops.append,
            ast.Break: self.jumps.append,
            ast.Continue: self.jumps.append,
            ast.Subscript: self.subscripts.append,
            ast.Raise: self.leaves.append,
            ast.Return: self.leaves.append,
            ast.ClassDef: self.classes.append,
        }

    def loads(self, name: str) -> list[Site]:
        """Return the sites that read a name."""
        return [Site(node, frame) for node, frame in self._loads.get(name, ())]

    def attributes(self, *names: str) -> list[Site]:
        """Return the sites that read or set attributes with these names; of any name by default."""
        return [
            Site(node, frame)
            for name in names or self._attributes
            for node, frame in self._attributes.get(name, ())
        ]

    def read(self, cell: ParsedCell) -> None:
        """Collect the nodes of one cell."""
        top = Frame(cell, cell.tree, "body", None, None)
        todo: Todo = [(node, top) for node in reversed(cell.tree.body)]
        attributes, kept = self._attributes, self._kept
        while todo:
            node, frame = place = todo.pop()
            kind = type(node)
            if kind is ast.Name:
                self._name(node, frame, place)  # type: ignore[arg-type]
                continue
            if kind is ast.Attribute:
                attributes.setdefault(node.attr, []).append(place)  # type: ignore[attr-defined]
                todo.append((node.value, frame))  # type: ignore[attr-defined]
                continue
            if kind in kept:
                site = Site(node, frame)
                kept[kind](site)
                if kind is ast.Call and frame.function is not None:
                    frame.function.calls.append(site)
            if kind in _ENTER:
                _ENTER[kind](node, frame, todo, self)
                continue
            for name in _FIELDS[kind]:
                value = getattr(node, name, None)
                if type(value) is list:
                    for item in reversed(value):
                        if item is not None:
                            todo.append((item, frame))
                elif value is not None:
                    todo.append((value, frame))

    def _name(self, node: ast.Name, frame: Frame, place: Place) -> None:
        function, name = frame.function, node.id
        if type(node.ctx) is ast.Load:
            if name in self._loads:
                self._loads[name].append(place)
            else:
                self._loads[name] = [place]
            if function is not None:
                function.loads.add(name)
        else:
            self.stored.add(name)
            if function is not None:
                function.locals.add(name)
                function.stored.add(name)


def _fields() -> dict[type, tuple[str, ...]]:
    """For each node class, the fields that hold nodes, the last first."""
    plain = {"ctx", "op", "ops", "id", "attr", "arg", "name", "asname", "lineno", "module"}
    plain |= {"level", "type_comment", "kind", "conversion", "is_async", "simple", "tag"}
    plain |= {"type_params", "annotation", "returns"}
    leaves = (ast.Constant, ast.alias, ast.Global, ast.Nonlocal, ast.pattern)
    fields: dict[type, tuple[str, ...]] = {}
    for kind in vars(ast).values():
        if isinstance(kind, type) and issubclass(kind, ast.AST):
            names = tuple(name for name in reversed(kind._fields) if name not in plain)
            fields[kind] = () if issubclass(kind, leaves) else names
    # `arg` and `name` are plain text in other classes.
    fields[ast.keyword] = ("value",)
    return fields


_FIELDS = _fields()


def _block(node: ast.AST, frame: Frame, todo: Todo, sites: Sites) -> None:
    """Compound statements: each block is a frame of its own, the head is not."""
    for name in _FIELDS[type(node)]:
        value = getattr(node, name, None)
        if not value:
            continue
        inside = frame
        if name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = Frame(frame.cell, node, name, frame, frame.function)
        for item in reversed(value if isinstance(value, list) else [value]):
            todo.append((item, inside))


def _either(node: ast.AST, frame: Frame, todo: Todo, sites: Sites) -> None:
    assert isinstance(node, ast.BoolOp)
    for at in range(len(node.values) - 1, -1, -1):
        inside = Frame(frame.cell, node, str(at), frame, frame.function) if at else frame
        todo.append((node.values[at], inside))


def _comprehension(node: ast.AST, frame: Frame, todo: Todo, sites: Sites) -> None:
    inside = Frame(frame.cell, node, "body", frame, frame.function)
    for name in _FIELDS[type(node)]:
        value = getattr(node, name, None)
        if value is not None:
            for item in reversed(value if isinstance(value, list) else [value]):
                todo.append((item, inside))


def _function(node: ast.AST, frame: Frame, todo: Todo, sites: Sites) -> None:
    assert isinstance(node, Function | ast.Lambda)
    arguments = node.args
    names = [
        part.arg
        for part in (
            *arguments.posonlyargs,
            *arguments.args,
            *([arguments.vararg] if arguments.vararg else []),
            *arguments.kwonlyargs,
            *([arguments.kwarg] if arguments.kwarg else []),
        )
    ]
    name = "" if isinstance(node, ast.Lambda) else node.name
    function = DefinedFunction(name, node, frame, names)
    function.locals.update(names)
    sites.functions.append(function)
    inside = Frame(frame.cell, node, "body", frame, function)
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    todo.extend((part, inside) for part in reversed(body))
    outside = [*([] if isinstance(node, ast.Lambda) else node.decorator_list)]
    outside += [*arguments.defaults, *(part for part in arguments.kw_defaults if part)]
    todo.extend((part, frame) for part in reversed(outside))


_ENTER: dict[type, Callable[[ast.AST, Frame, Todo, Sites], None]] = {
    **dict.fromkeys(
        (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith),
        _block,
    ),
    **dict.fromkeys((ast.ClassDef, ast.ExceptHandler, ast.Match, ast.match_case), _block),
    ast.BoolOp: _either,
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), _comprehension),
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda), _function),
}
if hasattr(ast, "TryStar"):
    _ENTER[ast.TryStar] = _block
