"""One walk over each cell's tree, which notes what rules look at and where it stands.

Without recursion, as expressions may be nested deeper than Python's own stack.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tpunb.lint.pages import Page
from tpunb.script.statements import Function

LOOPS = (ast.For, ast.AsyncFor, ast.While)
CONDITIONS = (ast.If, ast.IfExp, ast.While, ast.BoolOp)


class Frame:
    """What a node stands in: `part` is the field of `node`, a block or a condition."""

    __slots__ = ("function", "node", "page", "parent", "part")

    def __init__(
        self,
        page: Page,
        node: ast.AST,
        part: str,
        parent: Frame | None,
        function: Defined | None,
    ) -> None:
        self.page = page
        self.node = node
        self.part = part
        self.parent = parent
        self.function = function
        """The innermost function, None at the level of the cell."""

    def outward(self) -> Iterator[Frame]:
        """This frame and those around it, up to the function's or the cell's own."""
        frame: Frame | None = self
        while frame is not None and frame.function is self.function:
            yield frame
            frame = frame.parent


class Site:
    """A node and where it stands."""

    __slots__ = ("frame", "node")

    def __init__(self, node: ast.AST, frame: Frame) -> None:
        self.node = node
        self.frame = frame

    @property
    def page(self) -> Page:
        return self.frame.page

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)

    def loop(self) -> Frame | None:
        """The innermost loop of the same function whose body this stands in."""
        for frame in self.frame.outward():
            if isinstance(frame.node, LOOPS) and frame.part == "body":
                return frame
        return None

    def conditions(self, up_to: Frame | None = None) -> Iterator[tuple[ast.expr, bool]]:
        """Tests that decide whether this runs, the innermost first, and if it stands where
        they hold. Within the same function, or up to the frame `up_to`.
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
        """Whether it runs whenever its function or cell does: in no condition, loop or try."""
        return all(
            isinstance(frame.node, ast.Module | ast.ClassDef | Function)
            for frame in self.frame.outward()
        )


Todo = list[tuple[ast.AST, Frame]]


@dataclass(eq=False)
class Defined:
    """A function, a method or a lambda of the notebook."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    outer: Frame
    """Where it is defined."""
    parameters: list[str]
    locals: set[str] = field(default_factory=set)
    """Names that it binds, besides those that it imports."""
    calls: list[Site] = field(default_factory=list)
    loads: set[str] = field(default_factory=set)

    @property
    def method_of(self) -> ast.ClassDef | None:
        return self.outer.node if isinstance(self.outer.node, ast.ClassDef) else None


Place = tuple[ast.AST, Frame]
"""A node and its frame; as a Site only where it is looked at, as most never are."""


class Sites:
    """What was noted, in order of the notebook."""

    def __init__(self) -> None:
        self.calls: list[Site] = []
        self.imports: list[Site] = []
        self.assigns: list[Site] = []
        self.loops: list[Site] = []
        self.branches: list[Site] = []
        self.jumps: list[Site] = []
        self.subscripts: list[Site] = []
        self.leaves: list[Site] = []
        """`return` and `raise`."""
        self.classes: list[Site] = []
        self.functions: list[Defined] = []
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
            ast.If: self.branches.append,
            ast.Break: self.jumps.append,
            ast.Continue: self.jumps.append,
            ast.Subscript: self.subscripts.append,
            ast.Raise: self.leaves.append,
            ast.Return: self.leaves.append,
            ast.ClassDef: self.classes.append,
        }

    def loads(self, name: str) -> list[Site]:
        """Where a name is read."""
        return [Site(node, frame) for node, frame in self._loads.get(name, ())]

    def attributes(self, *names: str) -> list[Site]:
        """Where attributes with these names are read or set; of all names, without one."""
        return [
            Site(node, frame)
            for name in names or self._attributes
            for node, frame in self._attributes.get(name, ())
        ]

    def read(self, page: Page) -> None:
        """Note the nodes of one cell."""
        top = Frame(page, page.tree, "body", None, None)
        todo: Todo = [(node, top) for node in reversed(page.tree.body)]
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


def _fields() -> dict[type, tuple[str, ...]]:
    """For each class of nodes the fields that hold nodes, the last first."""
    plain = {"ctx", "op", "ops", "id", "attr", "arg", "name", "asname", "lineno", "module"}
    plain |= {"level", "type_comment", "kind", "conversion", "is_async", "simple", "tag"}
    plain |= {"type_params", "annotation", "returns"}
    leaves = (ast.Constant, ast.alias, ast.Global, ast.Nonlocal, ast.pattern)
    found: dict[type, tuple[str, ...]] = {}
    for kind in vars(ast).values():
        if isinstance(kind, type) and issubclass(kind, ast.AST):
            names = tuple(name for name in reversed(kind._fields) if name not in plain)
            found[kind] = () if issubclass(kind, leaves) else names
    # Here these names hold nodes.
    found[ast.keyword] = ("value",)
    return found


_FIELDS = _fields()


def _block(node: ast.AST, frame: Frame, todo: Todo, sites: Sites) -> None:
    """Statements with blocks: each block is a frame; what heads them is not."""
    for name in _FIELDS[type(node)]:
        value = getattr(node, name, None)
        if not value:
            continue
        inside = frame
        if name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = Frame(frame.page, node, name, frame, frame.function)
        for item in reversed(value if isinstance(value, list) else [value]):
            todo.append((item, inside))


def _either(node: ast.AST, frame: Frame, todo: Todo, sites: Sites) -> None:
    assert isinstance(node, ast.BoolOp)
    for at in range(len(node.values) - 1, -1, -1):
        inside = Frame(frame.page, node, str(at), frame, frame.function) if at else frame
        todo.append((node.values[at], inside))


def _comprehension(node: ast.AST, frame: Frame, todo: Todo, sites: Sites) -> None:
    inside = Frame(frame.page, node, "body", frame, frame.function)
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
    made = Defined(name, node, frame, names)
    made.locals.update(names)
    sites.functions.append(made)
    inside = Frame(frame.page, node, "body", frame, made)
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
