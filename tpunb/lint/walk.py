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


@dataclass
class Sites:
    """What was noted, in order of the notebook."""

    calls: list[Site] = field(default_factory=list)
    attributes: list[Site] = field(default_factory=list)
    imports: list[Site] = field(default_factory=list)
    assigns: list[Site] = field(default_factory=list)
    loops: list[Site] = field(default_factory=list)
    branches: list[Site] = field(default_factory=list)
    jumps: list[Site] = field(default_factory=list)
    withs: list[Site] = field(default_factory=list)
    subscripts: list[Site] = field(default_factory=list)
    raises: list[Site] = field(default_factory=list)
    functions: list[Defined] = field(default_factory=list)
    classes: list[Site] = field(default_factory=list)
    loads: dict[str, list[Site]] = field(default_factory=dict)
    stores: dict[str, list[Site]] = field(default_factory=dict)

    def calls_on(self, page: Page, line: int) -> list[Site]:
        """The calls of a page that a line is part of."""
        return [
            site
            for site in self.calls
            if site.page is page
            and isinstance(site.node, ast.Call)
            and site.line <= line <= (site.node.end_lineno or line)
        ]


Todo = list[tuple[ast.AST, Frame]]


def walk(page: Page, sites: Sites) -> None:
    """Note the nodes of one cell."""
    kept: dict[type, Callable[[Site], None]] = {
        ast.Call: sites.calls.append,
        ast.Attribute: sites.attributes.append,
        ast.Import: sites.imports.append,
        ast.ImportFrom: sites.imports.append,
        ast.Assign: sites.assigns.append,
        ast.AnnAssign: sites.assigns.append,
        ast.AugAssign: sites.assigns.append,
        ast.NamedExpr: sites.assigns.append,
        ast.For: sites.loops.append,
        ast.AsyncFor: sites.loops.append,
        ast.While: sites.loops.append,
        ast.If: sites.branches.append,
        ast.Break: sites.jumps.append,
        ast.Continue: sites.jumps.append,
        ast.With: sites.withs.append,
        ast.AsyncWith: sites.withs.append,
        ast.Subscript: sites.subscripts.append,
        ast.Raise: sites.raises.append,
        ast.Return: sites.raises.append,
        ast.ClassDef: sites.classes.append,
    }
    top = Frame(page, page.tree, "body", None, None)
    todo: Todo = [(node, top) for node in reversed(page.tree.body)]
    loads, stores = sites.loads, sites.stores
    while todo:
        node, frame = todo.pop()
        kind = type(node)
        if kind is ast.Name:
            function = frame.function
            if type(node.ctx) is ast.Load:  # type: ignore[attr-defined]
                loads.setdefault(node.id, []).append(Site(node, frame))  # type: ignore[attr-defined]
                if function is not None:
                    function.loads.add(node.id)  # type: ignore[attr-defined]
            else:
                stores.setdefault(node.id, []).append(Site(node, frame))  # type: ignore[attr-defined]
                if function is not None:
                    function.locals.add(node.id)  # type: ignore[attr-defined]
            continue
        keep = kept.get(kind)
        if keep is not None:
            site = Site(node, frame)
            keep(site)
            if kind is ast.Call and frame.function is not None:
                frame.function.calls.append(site)
        enter = _ENTER.get(kind)
        if enter is not None:
            enter(node, frame, todo, sites)
            continue
        for name in _FIELDS[kind]:
            value = getattr(node, name, None)
            if type(value) is list:
                for item in reversed(value):
                    if item is not None:
                        todo.append((item, frame))
            elif value is not None:
                todo.append((value, frame))


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
