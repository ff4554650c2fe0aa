"""Names in the cells of a notebook: what binds, changes and reads them, and which code runs.

One walk over the cells collects the nodes that readers ask for, each with the blocks around it (a
`Frame`) and the scope it belongs to. Everything else is answered from these: the bindings and the
references of a name, the full name of an expression, whether a node certainly runs, and the
functions that a call reaches by name. The walk is not recursive, because expressions may be nested
deeper than Python's own stack.
"""

from __future__ import annotations

import ast
import builtins
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

_WORD = re.compile(r"[^\W\d]\w*")
XM = "torch_xla.core.xla_model"
DEVICES = frozenset(
    {
        "torch_xla.device",
        "torch_xla.devices",
        "torch_xla.real_devices",
        "torch_xla.device_count",
        f"{XM}.xla_device",
        f"{XM}.xla_real_devices",
        f"{XM}.get_xla_supported_devices",
        "torch_xla.runtime.global_runtime_device_count",
        "torch_xla.runtime.addressable_runtime_device_count",
        "torch_xla.runtime.addressable_device_count",
        "torch_xla.runtime.global_device_count",
        "torch_xla.distributed.spmd.get_1d_mesh",
    }
)
"""Calls that start XLA's runtime (torch_xla 1.0 to 2.9)."""
TPUNB_LAUNCH = "tpunb.launch"
LAUNCHERS = frozenset(
    {
        TPUNB_LAUNCH,
        "torch_xla.launch",
        "torch_xla.distributed.xla_multiprocessing.spawn",
        "accelerate.notebook_launcher",
        "accelerate.launchers.notebook_launcher",
    }
)
"""Calls that start a function on every core."""
ANYTHING = frozenset("globals locals vars eval exec dir get_ipython __main__".split())
"""Code that uses one of these may use any name."""
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
CHANGING = frozenset(
    {
        *("load_state_dict", "load_weights", "append", "extend", "insert", "remove", "pop"),
        *("popitem", "clear", "update", "setdefault", "add", "discard", "sort", "reverse", "fit"),
        *("partial_fit", "fit_transform", "register_buffer", "register_parameter", "add_module"),
        *("set_params",),
    }
)
"""Methods that change their object, in addition to those that end with `_`, as torch's do."""

Part = Literal["prelude", "train", "kernel"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
FunctionOrClass = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
BUILTINS = frozenset(dir(builtins))


class Problem(NamedTuple):
    """The reason why a cell is not Python."""

    line: int
    reason: str
    kernel_runs_it: bool = False
    """True for special syntax that IPython runs but a script cannot contain."""


@dataclass(eq=False)
class ParsedCell:
    """One code cell as plain Python, and the part of the notebook that it belongs to."""

    index: int
    """Position in the notebook."""
    tree: ast.Module
    """Empty if the cell is not Python."""
    number: int = 0
    """The number shown next to the cell."""
    part: Part = "prelude"
    """`prelude`: runs once, above a train cell; `train`: runs on every core; `kernel`: runs in the
    notebook only. Without a train cell all are `prelude`, and the kernel runs them."""
    runs: bool = True
    """True if it is part of the run of the snapshot's own train cell."""
    lines: list[str] = field(default_factory=list)
    """The cell as it was written."""
    left_out: list[int] = field(default_factory=list)
    """Lines (from 1) with magics and shell commands that are not Python."""
    plain: list[str] = field(default_factory=list)
    """The cell as Python, line for line."""
    problem: Problem | None = None
    """None if the cell is Python."""
    own: Scopes | None = None
    """The nodes and names of this cell alone, once `KnownCells` has collected them."""

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


# Expressions


def dotted(node: ast.AST) -> str:
    """Return a name as it is written, 'self.optimizer'; '' for other nodes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def first_name(node: ast.AST, *, calls: bool = False) -> str:
    """Return the first name in `a.b[c].d`, with `calls` also in `a.b(c).d`; '' if there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript) or (calls and isinstance(node, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def last_part(node: ast.expr) -> str:
    """Return the last part of a name: 'step' for `self.optimizer.step`; '' for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def literal(node: ast.AST | None) -> object:
    """Return the value of a constant; Ellipsis for any other node."""
    return node.value if isinstance(node, ast.Constant) else ...


def argument(node: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the argument of a call with a name, or at a position (from 0); None if absent."""
    for word in node.keywords:
        if word.arg == name:
            return word.value
    if position is not None and len(node.args) > position:
        before = node.args[: position + 1]
        if not any(isinstance(part, ast.Starred) for part in before):
            return node.args[position]
    return None


def first_line(statement: ast.stmt) -> int:
    """Return the line (from 1) on which a statement starts, including its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def packages(node: ast.AST) -> set[str]:
    """Return the top-level packages of an import; none for a relative one and other nodes."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name that an import binds and the full name of the object, of each of its names.

    The full name is '' after a relative import. `import *` binds no names here.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, alias.name if alias.asname else top
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if alias.name != "*":
                known = node.module and not node.level
                yield alias.asname or alias.name, f"{node.module}.{alias.name}" if known else ""


# The walk


class Scope:
    """The names of a function, a lambda, a class or a comprehension, or the notebook's globals."""

    __slots__ = ("bindings", "globals", "node", "outer", "outside")

    def __init__(self, node: ast.AST | None, outer: Scope | None) -> None:
        self.node = node
        """None for the globals."""
        self.outer = outer
        self.globals: Scope = self if outer is None else outer.globals
        self.bindings: dict[str, list[Binding]] = {}
        self.outside: dict[str, Scope] = {}
        """Names that are declared `global` or `nonlocal` here, with the scope they are in."""

    def find(self, name: str) -> Scope | None:
        """Return the scope whose binding of a name is used here; None for an unbound name."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.outside:
                scope = scope.outside[name]
            if name in scope.bindings and (scope is self or type(scope.node) is not ast.ClassDef):
                return scope
            scope = scope.outer
        return None

    def bind(self, binding: Binding) -> None:
        """Add a binding that stands here to the scope that it belongs to."""
        home = self.outside.get(binding.name, self)
        home.bindings.setdefault(binding.name, []).append(binding)


class Frame:
    """The surroundings of a node: the field `part` (a block or a condition) of `node`."""

    __slots__ = ("_exits", "_runs", "cell", "function", "node", "parent", "part", "scope")

    def __init__(
        self,
        cell: ParsedCell,
        node: ast.AST,
        part: str,
        parent: Frame | None,
        function: DefinedFunction | None,
        scope: Scope,
    ) -> None:
        self.cell = cell
        self.node = node
        self.part = part
        self.parent = parent
        self.function = function
        """The innermost function; None at the top level of a cell."""
        self.scope = scope
        self._exits: dict[bool, _Position] = {}
        self._runs: dict[bool, bool] = {}

    def outward(self) -> Iterator[Frame]:
        """Yield this frame and those around it, up to that of the function or the cell."""
        frame: Frame | None = self
        while frame is not None and frame.function is self.function:
            yield frame
            frame = frame.parent

    def reaches(self, node: ast.AST, *, errors: bool) -> bool:
        """Whether a node in this frame certainly runs if the function or the cell does.

        With `errors`, an error of the node must also be the first that ends it: no handler catches
        it, and no statement above it may raise one.
        """
        if errors not in self._runs:
            inner = self.parent is not None and self.parent.function is self.function
            self._runs[errors] = _is_entered(self.node, self.part, errors=errors) and (
                not inner
                or (self.parent is not None and self.parent.reaches(self.node, errors=errors))
            )
            block = getattr(self.node, self.part, None)
            self._exits[errors] = _first_exit(block, errors=errors)
        at = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        return self._runs[errors] and at < self._exits[errors]


_Position = tuple[int, int]
_END = (1 << 30, 0)


def _is_entered(node: ast.AST, part: str, *, errors: bool) -> bool:
    """Whether a block certainly runs with its statement. Bodies of loops are assumed to run."""
    if isinstance(node, ast.If):
        return part == "body" and ast.unparse(node.test) == "__name__ == '__main__'"
    if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":  # new in Python 3.11
        handled = errors and bool(node.handlers)  # type: ignore[attr-defined]
        return part == "finalbody" or (part == "body" and not handled)
    if isinstance(node, ast.With | ast.AsyncWith) and errors:
        return not any("suppress" in ast.unparse(item.context_expr) for item in node.items)
    # Other frames are branches: of `and`, `a if b else c`, `match` and so on.
    entered = (*LOOPS, ast.Module, ast.ClassDef, ast.Lambda, ast.With, ast.AsyncWith)
    return part == "body" and isinstance(node, (*entered, *COMPREHENSIONS, Function))


def _first_exit(block: object, *, errors: bool) -> _Position:
    """The end of the first statement of a block that may leave it."""
    ways = (ast.Return, ast.Raise) if errors else (ast.Return,)
    for statement in block if isinstance(block, list) else ():
        if isinstance(statement, ast.stmt) and _may_leave(statement, ways):
            return statement.end_lineno or 0, statement.end_col_offset or 0
    return _END


def _may_leave(statement: ast.stmt, ways: tuple[type[ast.stmt], ...]) -> bool:
    """Whether a statement may leave the block that it is in: also by `break` or `continue`, which
    only leave loops.
    """
    loops = (ast.Break, ast.Continue)
    todo: list[tuple[ast.AST, bool]] = [(statement, False)]
    while todo:
        node, in_loop = todo.pop()
        if isinstance(node, ways) or (isinstance(node, loops) and not in_loop):
            return True
        if isinstance(node, (*LOOPS, ast.If, ast.With, ast.AsyncWith, ast.Match)) or hasattr(
            node, "handlers"
        ):
            in_loop = in_loop or isinstance(node, LOOPS)
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                todo += [(child, in_loop) for child in getattr(node, part, ())]
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            todo += [(child, in_loop) for child in node.body]
    return False


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
    def scope(self) -> Scope:
        return self.frame.scope

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)

    @property
    def place(self) -> tuple[int, int]:
        """Its cell and line, which compare in the notebook's order."""
        return self.cell.index, self.line

    @property
    def call(self) -> ast.Call:
        """The node of a site that is a call."""
        assert isinstance(self.node, ast.Call)
        return self.node

    def runs(self) -> bool:
        """Whether the node certainly runs if its function or cell does, unless an error ends it."""
        return self.frame.reaches(self.node, errors=False)

    def fails(self) -> bool:
        """Whether an error at the node certainly ends its function or cell when that runs."""
        return self.frame.reaches(self.node, errors=True)

    def ends_cell(self) -> bool:
        """Whether an error at the node certainly ends the run of its cell.

        Not in a loop, which may have no first round: `while not os.path.exists(path): …`.
        """
        return self.frame.function is None and self.loop() is None and self.fails()

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


class Binding(NamedTuple):
    name: str
    node: ast.AST
    """The target, the definition, the parameter, the pattern, the handler, or the whole import."""
    frame: Frame
    full: str | None = None
    """For an import: the full name of the object, '' if it is relative."""
    changes: bool = False
    """True for `x += 1`, which needs a value that is there already."""


def _begin(binding: Binding) -> tuple[int, int]:
    """The place from which on a name may have the value of a binding: in a comprehension, a walrus
    in a condition runs before the element above it.
    """
    nodes = [f.node for f in binding.frame.outward() if isinstance(f.node, COMPREHENSIONS)]
    return min(Site(node, binding.frame).place for node in (binding.node, *nodes))


@dataclass(eq=False)
class DefinedFunction:
    """A function, a method or a lambda of the notebook."""

    name: str
    """'' for a lambda."""
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    outer: Frame
    """The frame in which it is defined."""
    scope: Scope
    parameters: list[str]
    sites: list[Site] = field(default_factory=list)
    """The collected nodes in it, in order."""
    loads: set[str] = field(default_factory=set)

    @property
    def method_of(self) -> ast.ClassDef | None:
        node = self.outer.scope.node
        return node if isinstance(node, ast.ClassDef) else None

    @property
    def calls(self) -> list[Site]:
        return [site for site in self.sites if type(site.node) is ast.Call]


Place = tuple[ast.AST, Frame]
"""A node and its frame. A Site is only made when it is asked for, which is seldom."""
Todo = list[Place]


_LISTS = (
    *("cells", "functions", "stars", "calls", "imports", "assigns", "loops", "jumps"),
    *("subscripts", "classes", "_annotations"),
)


class Scopes:
    """The nodes, names and functions of a notebook's cells, in order."""

    def __init__(self, cells: Iterable[ParsedCell] = (), globals: Scope | None = None) -> None:
        self.globals = globals or Scope(None, None)
        self.bindings_here = self.globals.bindings
        """The global names of these cells; the scope of globals may get those of others."""
        self.every = [self.globals]
        """All scopes."""
        self.cells: list[ParsedCell] = []
        self.functions: list[DefinedFunction] = []
        self.stars: list[Site] = []
        """`from x import *`, which may bind any name."""
        self._loads: dict[str, list[Place]] = {}
        self._attributes: dict[str, list[Place]] = {}
        self.calls: list[Site] = []
        self.imports: list[Site] = []
        self.assigns: list[Site] = []
        self.loops: list[Site] = []
        self.jumps: list[Site] = []
        self.subscripts: list[Site] = []
        self.classes: list[Site] = []
        self._kept: dict[type, list[Site]] = {
            **{ast.Call: self.calls, ast.Subscript: self.subscripts, ast.ClassDef: self.classes},
            **dict.fromkeys((ast.Import, ast.ImportFrom), self.imports),
            **dict.fromkeys((ast.Assign, ast.AnnAssign, ast.NamedExpr), self.assigns),
            **dict.fromkeys(LOOPS, self.loops),
            **dict.fromkeys((ast.Break, ast.Continue), self.jumps),
        }
        self._annotations: list[Place] = []
        self._top: dict[ParsedCell, list[Site]] = {}
        self.made: dict[Callable[[Scopes], Any], Any] = {}
        """What readers have made of a cell's own, by the function that makes it."""
        for cell in cells:
            self.read(cell)

    def add(self, part: Scopes) -> None:
        """Add the nodes and names of a cell that was read with the same scope of globals."""
        self.every += part.every[1:]
        self._top |= part._top
        for name in _LISTS:
            getattr(self, name).extend(getattr(part, name))
        named: Any = (
            (self.globals.bindings, part.bindings_here),
            (self._loads, part._loads),
            (self._attributes, part._attributes),
        )
        for whole, own in named:
            for name, found in own.items():
                whole.setdefault(name, []).extend(found)

    def loads(self, name: str) -> list[Site]:
        """Return the sites that read a name, in any scope."""
        return [Site(node, frame) for node, frame in self._loads.get(name, ())]

    def attributes(self, *names: str) -> list[Site]:
        """Return the sites that read or set attributes with these names; of any name by default."""
        return [
            Site(node, frame)
            for name in names or self._attributes
            for node, frame in self._attributes.get(name, ())
        ]

    # Bindings and references

    def bindings(self, name: str, scope: Scope) -> list[Binding]:
        """Return the bindings of a name as code in a scope sees it; none for an unbound name."""
        home = scope.find(name)
        return [] if home is None else home.bindings[name]

    def binds(self, name: str) -> bool:
        """Whether the cells themselves may bind a name anywhere, without `import *`."""
        scopes = (scope for scope in self.every if not isinstance(scope.node, ast.ClassDef))
        return any(name in scope.bindings for scope in scopes)

    def needs(self, name: str) -> bool:
        """Whether a cell reads a name that neither it nor a cell above it binds."""
        bound = {one.frame.cell for one in self.globals.bindings.get(name, ())}
        first = next((at for at, cell in enumerate(self.cells) if cell in bound), len(self.cells))
        return any(
            site.scope.find(name) in (None, self.globals) and site.cell in self.cells[:first]
            for site in self.loads(name)
        )

    def may_read(self, name: str) -> bool:
        """Whether any code may read a global variable of this name."""
        anywhere = (None, self.globals)
        return any(map(self.loads, ANYTHING)) or any(
            site.scope.find(name) in anywhere for site in self.loads(name)
        )

    def unbound(self) -> Iterator[tuple[Site, list[Binding]]]:
        """Yield the reads of names that no cell binds, and those at the top level of a cell that
        only code below binds, with these bindings. Builtins are such names, too.
        """
        for name, places in self._loads.items():
            bindings = [one for one in self.globals.bindings.get(name, ()) if not one.changes]
            for node, frame in places:
                home, site = frame.scope.find(name), Site(node, frame)
                if home is None:
                    yield site, []
                elif (
                    home is self.globals
                    and (not bindings or frame.function is None)
                    and all(_begin(one) > site.place for one in bindings)
                ):
                    yield site, bindings

    def reads(self, owner: ParsedCell | DefinedFunction) -> list[Site]:
        """Return the reads of global names in code at the top level of a cell, or in a function, in
        source order, with the attributes that are read of such names. Also of unbound names.
        """
        return self._reads.get(owner, [])

    @cached_property
    def _reads(self) -> dict[ParsedCell | DefinedFunction, list[Site]]:
        places = [place for places in self._loads.values() for place in places]
        places += [
            (node, frame)
            for places in self._attributes.values()
            for node, frame in places
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and isinstance(node.ctx, ast.Load)
        ]
        reads: dict[ParsedCell | DefinedFunction, list[Site]] = {}
        for node, frame in places:
            if frame.scope.find(first_name(node)) in (None, self.globals):
                reads.setdefault(frame.function or frame.cell, []).append(Site(node, frame))
        for sites in reads.values():
            sites.sort(key=lambda site: (site.line, site.node.col_offset))  # type: ignore[attr-defined]
        return reads

    def bound(self, cell: ParsedCell) -> set[str]:
        """Return the names that a cell defines in the notebook, without those of `import *`.

        Also those that its functions declare `global`. `x += 1` defines no name.
        """
        return self._bound.get(cell, set())

    @cached_property
    def _bound(self) -> dict[ParsedCell, set[str]]:
        bound: dict[ParsedCell, set[str]] = {}
        for name, bindings in self.globals.bindings.items():
            for binding in bindings:
                if not binding.changes:
                    bound.setdefault(binding.frame.cell, set()).add(name)
        return bound

    @cached_property
    def scopes(self) -> dict[ast.AST, Scope]:
        """The scope of each collected node and of each name."""
        places = [place for places in self._loads.values() for place in places]
        places += [place for places in self._attributes.values() for place in places]
        found = {node: frame.scope for node, frame in places}
        for sites in self._kept.values():
            found.update((site.node, site.scope) for site in sites)
        for node, frame in self._annotations:
            found.update(dict.fromkeys(ast.walk(node), frame.scope))
        for scope in self.every:
            for bindings in scope.bindings.values():
                found.update((one.node, one.frame.scope) for one in bindings)
        return found

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Each node's parent; the cell's module for a statement at the top level."""
        return {
            child: node
            for cell in self.cells
            for node in ast.walk(cell.tree)
            for child in ast.iter_child_nodes(node)
        }

    # Full names

    def full(self, node: ast.AST, scope: Scope) -> str:
        """Return the full dotted name of an expression: 'torch_xla.core.xla_model.mark_step' for
        `xm.mark_step`. The full name of a builtin is its name; '' for anything not imported.
        """
        name, _, rest = dotted(node).partition(".")
        if not name:
            return ""
        home = scope.find(name)
        if home is not None:
            newest = reversed(home.bindings[name])
            root = next((one.full for one in newest if one.full is not None), "")
        else:
            root = name if name in BUILTINS else ""
        return f"{root}.{rest}" if root and rest else root

    def full_or_written(self, node: ast.AST, scope: Scope) -> str:
        """Return the full name of an expression; as it is written if no cell binds its first name.

        Code that the analysis does not see may have imported that: `from x import *`.
        """
        full = self.full(node, scope)
        written = dotted(node)
        if full or not written or scope.find(written.partition(".")[0]) is not None:
            return full
        return written

    def written(self, node: ast.AST) -> str:
        """Return `full_or_written` of any collected node or name."""
        scope = self.scopes.get(node)
        return "" if scope is None else self.full_or_written(node, scope)

    def full_names(self, node: ast.AST, scope: Scope) -> set[str]:
        """Return all full names that an expression may have; '' stands for one not imported."""
        name, _, rest = dotted(node).partition(".")
        bindings = self.bindings(name, scope)
        roots = {one.full or "" for one in bindings} or {name if name in BUILTINS else ""}
        return {f"{root}.{rest}" if root and rest else root for root in roots}

    def is_certain(self, node: ast.AST, scope: Scope) -> bool:
        """Whether an expression can only have the one full name that `full` returns."""
        names = self.full_names(node, scope)
        return not self.stars and len(names) == 1 and "" not in names

    # Environment variables

    def variables_set(self, site: Site) -> Iterator[tuple[ast.expr | None, ast.expr]]:
        """Yield name and value of each environment variable that an assignment or a call sets."""
        node = site.node
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and self._is_environ(target.value, site):
                    yield target.slice, node.value
        elif isinstance(node, ast.Call):
            name = self.full_or_written(node.func, site.scope)
            if name in ("os.environ.setdefault", "os.putenv") and len(node.args) > 1:
                yield node.args[0], node.args[1]
            elif name == "os.environ.update":
                yield from ((ast.Constant(word.arg), word.value) for word in node.keywords)
                for part in node.args:
                    if isinstance(part, ast.Dict):
                        yield from zip(part.keys, part.values, strict=True)

    def _is_environ(self, node: ast.expr, site: Site) -> bool:
        return self.full_or_written(node, site.scope) == "os.environ"

    # Reach by name

    @cached_property
    def by_name(self) -> dict[str, list[DefinedFunction]]:
        named: dict[str, list[DefinedFunction]] = {}
        for function in self.functions:
            if function.name:
                named.setdefault(function.name, []).append(function)
        return named

    def targets(self, call: ast.Call) -> list[DefinedFunction]:
        """The functions of the notebook that a call may run: `f()` runs a function named f,
        `x.f()` a method named f.
        """
        method = isinstance(call.func, ast.Attribute)
        functions = self.by_name.get(last_part(call.func), ())
        return [f for f in functions if (f.method_of is not None) == method]

    def launched(self, launch: ast.Call) -> list[DefinedFunction]:
        """The functions of the notebook that a launcher may start."""
        target = argument(launch, "fn", 0) or argument(launch, "function", 0)
        if isinstance(target, ast.Call) and target.args:  # functools.partial(fn, …)
            target = target.args[0]
        if isinstance(target, ast.Lambda):
            return [f for f in self.functions if f.node is target]
        return [] if target is None else self.by_name.get(last_part(target), [])

    def started(self, call: ast.Call) -> list[DefinedFunction]:
        """The functions that a call may run itself, with those that make an object of a class."""
        methods = (f for name in CONSTRUCTORS for f in self.by_name.get(name, ()))
        made = last_part(call.func)
        makers = [f for f in methods if f.method_of is not None and f.method_of.name == made]
        return [*self.targets(call), *makers]

    def called(self, site: Site) -> list[DefinedFunction]:
        """The functions that a call may run, also as a launcher."""
        assert isinstance(site.node, ast.Call)
        launches = self.full(site.node.func, site.scope) in LAUNCHERS
        return [*self.started(site.node), *(self.launched(site.node) if launches else ())]

    def executed(
        self, cell: ParsedCell, *, certain: bool = False, launches: bool = False
    ) -> Iterator[Site]:
        """Yield the collected nodes that run with a cell, then those of the functions that it
        calls, with `launches` also of those that it launches; with `certain`, only those that
        certainly run.
        """
        entered: set[DefinedFunction] = set()
        todo = [self._top[cell]]
        while todo:
            for site in todo.pop(0):
                if certain and not site.runs():
                    continue
                yield site
                if not isinstance(site.node, ast.Call):
                    continue
                for function in self.called(site) if launches else self.started(site.node):
                    if function not in entered:
                        entered.add(function)
                        todo.append(function.sites)

    # The walk

    def read(self, cell: ParsedCell) -> None:
        """Collect the nodes of one cell."""
        self.cells.append(cell)
        top = Frame(cell, cell.tree, "body", None, None, self.globals)
        todo: Todo = [(node, top) for node in reversed(cell.tree.body)]
        attributes, kept = self._attributes, self._kept
        own = self._top[cell] = []
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
                kept[kind].append(site)
                (own if frame.function is None else frame.function.sites).append(site)
            if kind in _ENTER:
                _ENTER[kind](self, node, frame, todo)
                continue
            for name in _FIELDS[kind]:
                value = getattr(node, name, None)
                if type(value) is list:
                    for item in reversed(value):
                        if item is not None:
                            todo.append((item, frame))
                elif value is not None:
                    todo.append((value, frame))

    def _scope(self, node: ast.AST, frame: Frame) -> Scope:
        scope = Scope(node, frame.scope)
        self.every.append(scope)
        return scope

    def _name(self, node: ast.Name, frame: Frame, place: Place) -> None:
        name, scope = node.id, frame.scope
        if type(node.ctx) is ast.Load:
            if name in self._loads:
                self._loads[name].append(place)
            else:
                self._loads[name] = [place]
            if frame.function is not None:
                frame.function.loads.add(name)
        else:
            scope.bind(Binding(name, node, frame))

    def _block(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        """Compound statements: each block is a frame of its own, the head is not."""
        if isinstance(node, ast.ExceptHandler) and node.name:
            frame.scope.bind(Binding(node.name, node, frame))
        scope = frame.scope
        if isinstance(node, ast.ClassDef):
            scope.bind(Binding(node.name, node, frame))
            scope = self._scope(node, frame)
        for name in _FIELDS[type(node)]:
            value = getattr(node, name, None)
            if not value:
                continue
            inside = frame
            if name in ("body", "orelse", "finalbody", "handlers", "cases"):
                inside = Frame(frame.cell, node, name, frame, frame.function, scope)
            for item in reversed(value if isinstance(value, list) else [value]):
                todo.append((item, inside))

    def _either(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, ast.BoolOp)
        for at in range(len(node.values) - 1, -1, -1):
            inside = frame
            if at:
                inside = Frame(frame.cell, node, str(at), frame, frame.function, frame.scope)
            todo.append((node.values[at], inside))

    def _assert(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, ast.Assert)
        if node.msg is not None:
            inside = Frame(frame.cell, node, "msg", frame, frame.function, frame.scope)
            todo.append((node.msg, inside))
        todo.append((node.test, frame))

    def _comprehension(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, COMPREHENSIONS)
        scope = self._scope(node, frame)
        inside = Frame(frame.cell, node, "body", frame, frame.function, scope)
        parts: Todo = []
        for loop in node.generators:
            parts += [(loop.iter, inside if parts else frame), (loop.target, inside)]
            for test in loop.ifs:
                parts.append((test, inside))
                inside = Frame(frame.cell, node, "filtered", frame, frame.function, scope)
        values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        parts += [(value, inside) for value in values]
        todo += reversed(parts)

    def _function(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, Function | ast.Lambda)
        args = node.args
        every = [*args.posonlyargs, *args.args, *([args.vararg] if args.vararg else [])]
        every += [*args.kwonlyargs, *([args.kwarg] if args.kwarg else [])]
        name = "" if isinstance(node, ast.Lambda) else node.name
        scope = self._scope(node, frame)
        function = DefinedFunction(name, node, frame, scope, [arg.arg for arg in every])
        self.functions.append(function)
        inside = Frame(frame.cell, node, "body", frame, function, scope)
        for arg in every:
            scope.bind(Binding(arg.arg, arg, inside))
        notes = [arg.annotation for arg in every]
        body: list[ast.expr] | list[ast.stmt]
        if isinstance(node, ast.Lambda):
            body, outside = [node.body], []
        else:
            frame.scope.bind(Binding(name, node, frame))
            body, outside = node.body, list(node.decorator_list)
            notes.append(node.returns)
        self._annotations += [(note, frame) for note in notes if note is not None]
        todo.extend((part, inside) for part in reversed(body))
        outside += [*args.defaults, *(part for part in args.kw_defaults if part)]
        todo.extend((part, frame) for part in reversed(outside))

    def _change(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, ast.AugAssign)
        todo.append((node.value, frame))
        if isinstance(node.target, ast.Name):
            name = node.target.id
            frame.scope.bind(Binding(name, node.target, frame, changes=True))
            self._loads.setdefault(name, []).append((node.target, frame))
        else:
            todo.append((node.target, frame))

    def _walrus(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, ast.NamedExpr)
        scope = frame.scope
        while isinstance(scope.node, COMPREHENSIONS) and scope.outer is not None:
            scope = scope.outer
        scope.bind(Binding(node.target.id, node.target, frame))
        todo.append((node.value, frame))

    def _annotated(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, ast.AnnAssign)
        self._annotations.append((node.annotation, frame))
        if node.value is not None:
            todo.append((node.value, frame))
        todo.append((node.target, frame))

    def _import(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        for name, full in imported(node):
            frame.scope.bind(Binding(name, node, frame, full))
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            self.stars.append(Site(node, frame))

    def _declare(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, ast.Global | ast.Nonlocal)
        scope = frame.scope
        for name in node.names:
            home: Scope | None = scope.globals
            if isinstance(node, ast.Nonlocal):
                home = scope.outer and scope.outer.find(name)
            if home is not None and home is not scope:
                scope.outside[name] = home

    def _case(self, node: ast.AST, frame: Frame, todo: Todo) -> None:
        assert isinstance(node, ast.match_case)
        self._block(node, frame, todo)
        for part in ast.walk(node.pattern):
            name = getattr(part, "rest" if isinstance(part, ast.MatchMapping) else "name", None)
            if isinstance(name, str):
                frame.scope.bind(Binding(name, part, frame))
            elif isinstance(part, ast.MatchValue):
                todo.append((part.value, frame))
            elif isinstance(part, ast.MatchClass):
                todo.append((part.cls, frame))


def _fields() -> dict[type, tuple[str, ...]]:
    """For each node class, the fields that hold nodes, the last first."""
    plain = {"ctx", "op", "ops", "id", "attr", "arg", "name", "asname", "lineno", "module"}
    plain |= {"level", "type_comment", "kind", "conversion", "is_async", "simple", "tag"}
    plain |= {"type_params", "annotation", "returns"}
    leaves = (ast.Constant, ast.alias, ast.pattern)
    fields: dict[type, tuple[str, ...]] = {}
    for kind in vars(ast).values():
        if isinstance(kind, type) and issubclass(kind, ast.AST):
            names = tuple(name for name in reversed(kind._fields) if name not in plain)
            fields[kind] = () if issubclass(kind, leaves) else names
    # `arg` and `name` are plain text in other classes.
    fields[ast.keyword] = ("value",)
    return fields


_FIELDS = _fields()
_ENTER: dict[type, Callable[[Scopes, ast.AST, Frame, Todo], None]] = {
    **dict.fromkeys(
        (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith),
        Scopes._block,
    ),
    **dict.fromkeys((ast.ClassDef, ast.ExceptHandler, ast.Match), Scopes._block),
    ast.match_case: Scopes._case,
    ast.BoolOp: Scopes._either,
    ast.Assert: Scopes._assert,
    **dict.fromkeys(COMPREHENSIONS, Scopes._comprehension),
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda), Scopes._function),
    ast.AugAssign: Scopes._change,
    ast.AnnAssign: Scopes._annotated,
    ast.NamedExpr: Scopes._walrus,
    **dict.fromkeys((ast.Import, ast.ImportFrom), Scopes._import),
    **dict.fromkeys((ast.Global, ast.Nonlocal), Scopes._declare),
}
if hasattr(ast, "TryStar"):
    _ENTER[ast.TryStar] = Scopes._block


class KnownCells(threading.local):
    """The cells that were read last, by their texts: only what is new is parsed and walked.

    A text that is in a notebook twice is two cells. Cells and the scope of globals are used again:
    once scopes are made, the thread's earlier ones must no longer be used.
    """

    def __init__(self) -> None:
        self._globals = Scope(None, None)
        self._cells: dict[tuple[str, int], tuple[int, ParsedCell]] = {}
        """By text and by how often it was there above: when it was last used, and the cell."""
        self._times = Counter[str]()
        self._now = 0

    def begin(self) -> None:
        """Begin with the first cell of a notebook, and forget cells that are no longer used."""
        self._now += 1
        self._times.clear()
        oldest = self._now - _KEPT
        self._cells = {key: kept for key, kept in self._cells.items() if kept[0] > oldest}

    def parse(self, text: str, index: int, number: int, lines: list[str]) -> ParsedCell:
        """Return the next cell of the notebook, part of the prelude. Raises as `ast.parse`."""
        key = text, self._times[text]
        self._times[text] += 1
        known = self._cells.get(key)
        if known is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warned about the cells when they ran
                cell = ParsedCell(index, ast.parse(text))
        else:
            cell = known[1]
        vars(cell).update(vars(ParsedCell(index, cell.tree, number, lines=lines, own=cell.own)))
        self._cells[key] = self._now, cell
        return cell

    def scopes(self, cells: Iterable[ParsedCell]) -> Scopes:
        """Return the scopes of cells from `parse`, and of others, which are read now."""
        cells = list(cells)
        for cell in cells:
            if cell.own is None:
                self._globals.bindings = {}
                cell.own = Scopes([cell], self._globals)
        self._globals.bindings = {}
        whole = Scopes(globals=self._globals)
        for cell in cells:
            whole.add(cell.own)  # type: ignore[arg-type]
        return whole


_KEPT = 8
"""A cell is forgotten when it was in none of so many notebooks: a train cell reads its own, in part
or whole, four times."""
KNOWN = KnownCells()


@lru_cache(maxsize=4096)
def words(source: str) -> Counter[str]:
    """Return the words in code that may be names, and how often each is there; do not change it."""
    return Counter(_WORD.findall(source))


@lru_cache(maxsize=8192)
def mentions(pattern: re.Pattern[str], source: str) -> bool:
    """Return whether a pattern is found in code."""
    return pattern.search(source) is not None


def scopes_of(*trees: ast.Module) -> Scopes:
    """Return the scopes of the code of some cells."""
    return Scopes(ParsedCell(index, tree) for index, tree in enumerate(trees))


def bound_names(tree: ast.Module) -> set[str]:
    """Return the names that code defines in the notebook, without those of `import *`."""
    scopes = scopes_of(tree)
    return scopes.bound(scopes.cells[0])


def changed_names(tree: ast.Module) -> set[str]:
    """Return the names that code at the top level assigns, or whose objects it changes.

    Imports do not count, because importing again gives the same object. Names that begin with an
    underscore do not count.
    """
    scopes = scopes_of(tree)
    names = {first_name(site.node) for site in _changing(scopes)}
    for name, bindings in scopes.globals.bindings.items():
        here = [one.full is None for one in bindings if one.frame.function is None]
        names |= {name} if here and all(here) else set()
    return {name for name in names if name and not name.startswith("_")}


def _changing(scopes: Scopes) -> Iterator[Site]:
    """Yield the objects that code at the top level changes."""
    for site in (*scopes.attributes(), *scopes.subscripts, *scopes.calls):
        node = site.node
        if site.frame.function is not None:
            continue
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and changes_object(node):
                yield Site(node.func, site.frame)
        elif not isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
            yield site


def changes_object(call: ast.Call) -> bool:
    """Whether a call of a method changes the method's object."""
    name = last_part(call.func)
    return (
        name in CHANGING
        or (name.endswith("_") and not name.startswith("_"))
        or any(
            word.arg == "inplace"
            and isinstance(word.value, ast.Constant)
            and word.value.value is True
            for word in call.keywords
        )
    )
