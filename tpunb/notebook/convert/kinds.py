"""Infer kinds of values, such as data or figures, from the cells of a run."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from tpunb.notebook.convert import pure_calls
from tpunb.notebook.scopes import COMPREHENSIONS, Function, FunctionOrClass


@dataclass
class Bindings:
    """Names that are bound in one scope."""

    names: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    """Declared `global`, in this scope or in a nested function."""
    changed: set[str] = field(default_factory=set)
    """Targets of `x += 1`, which makes a name local to a function, but needs an existing value."""
    outer: set[str] = field(default_factory=set)
    """Declared `nonlocal`."""
    stars: bool = False
    """True if there is an `import *`."""


def bindings(nodes: Iterable[ast.AST]) -> Bindings:
    """Return the names that nodes bind in their own scope, not in nested functions or classes.

    `symtable` is no alternative: since Python 3.12 its tables mix the names of comprehensions with
    those of the enclosing scope, before 3.12 they do not.
    """
    bound = Bindings()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            bound.changed.add(node.target.id)
            todo.append(node.value)
            continue
        _store(node, bound)
        if isinstance(node, FunctionOrClass):
            _inside(node, bound)
            todo += node.decorator_list
        elif isinstance(node, ast.Lambda):
            _inside(node, bound)
        elif isinstance(node, COMPREHENSIONS):
            # `:=` in a comprehension binds in the enclosing scope.
            todo += [part for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
        else:
            todo += ast.iter_child_nodes(node)
    return bound


def parameters(function: Function | ast.Lambda) -> set[str]:
    """Return the names of a function's parameters."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {arg.arg for arg in every if arg is not None}


def _inside(node: ast.AST, bound: Bindings) -> None:
    """Add the names of `global` statements anywhere in a nested scope."""
    for part in ast.walk(node):
        if isinstance(part, ast.Global):
            bound.globals.update(part.names)


def _store(node: ast.AST, bound: Bindings) -> None:
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            bound.names.add(node.id)
    elif isinstance(node, FunctionOrClass):
        bound.names.add(node.name)
    elif isinstance(node, ast.alias):
        bound.stars |= node.name == "*"
        bound.names.add(node.asname or node.name.partition(".")[0])
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        bound.names |= {node.name} if node.name else set()
    elif isinstance(node, ast.MatchMapping):
        bound.names |= {node.rest} if node.rest else set()
    elif isinstance(node, ast.Global):
        bound.globals.update(node.names)
    elif isinstance(node, ast.Nonlocal):
        bound.outer.update(node.names)


def bound_anywhere(tree: ast.AST) -> set[str]:
    """Return all names that are assigned, imported or defined anywhere in a cell."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


class Kind(Enum):
    """Kind of a value."""

    NOTHING_YET = 0
    DATA = 1
    """A number, string, array, tensor or table: reading it or its elements has no effect."""
    HOLDER = 2
    """A list, dict or similar: reading it has no effect, but its elements may be anything."""
    PLOT = 3
    """A figure, its axes, or a part of them."""
    MODEL = 4
    RESULT = 5
    """A RunResult."""
    OTHER = 6


class How(Enum):
    """How a name is bound."""

    IMPORT = 0
    VALUE = 1
    """To the value of an expression."""
    ELEMENT = 2
    """To an element of an expression's value."""
    INNER = 3
    """To an element of such an element."""
    CLASS = 4
    UNKNOWN = 5


Binding = tuple[How, "ast.AST | str | None"]
"""How a name is bound, and what to: the full name of an import, an expression, a class."""
UNKNOWN: Binding = (How.UNKNOWN, None)


def module_bindings(tree: ast.Module) -> dict[str, list[Binding]]:
    """Return all bindings of module-level names in a cell."""
    found: dict[str, list[Binding]] = {}
    todo: list[ast.AST] = [*tree.body]
    explained: dict[int, Binding] = {}
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Assign):
            for target in node.targets:
                explained |= _explain(target, How.VALUE, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            explained |= _explain(node.target, How.VALUE, node.value)
        elif isinstance(node, ast.For):
            explained |= _explain(node.target, How.ELEMENT, node.iter)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.setdefault(node.id, []).append(explained.get(id(node), UNKNOWN))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                full = alias.name if alias.asname else top
                found.setdefault(alias.asname or top, []).append((How.IMPORT, full))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                how = UNKNOWN if node.level else (How.IMPORT, f"{node.module}.{alias.name}")
                found.setdefault(alias.asname or alias.name, []).append(how)
        elif isinstance(node, ast.ClassDef):
            found.setdefault(node.name, []).append((How.CLASS, node))
        if isinstance(node, COMPREHENSIONS):
            todo += [part for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
        elif not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    bound = bindings(tree.body)
    for name in (bound.names | bound.changed) - found.keys() | bound.globals:
        found.setdefault(name, []).append(UNKNOWN)
    return found


def _explain(target: ast.expr, how: How, value: ast.expr) -> dict[int, Binding]:
    """Return how each name of a target is bound, by the `id()` of its node."""
    if isinstance(target, ast.Name):
        return {id(target): (how, value)}
    if not isinstance(target, ast.Tuple | ast.List):
        return {}
    parts = target.elts
    values: list[tuple[How, ast.expr]] = [
        (How.ELEMENT if how is How.VALUE else How.INNER, value)
    ] * len(parts)
    if how is How.VALUE and isinstance(value, ast.Tuple | ast.List):
        if len(value.elts) == len(parts):
            values = [(How.VALUE, part) for part in value.elts]
    elif how is How.ELEMENT and isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id == "zip" and len(value.args) == len(parts):
            values = [(How.ELEMENT, part) for part in value.args]
        elif value.func.id == "enumerate" and len(parts) == 2 and value.args:
            values = [(How.VALUE, ast.Constant(0)), (How.ELEMENT, value.args[0])]
    explained: dict[int, Binding] = {}
    for part, (inner, of) in zip(parts, values, strict=True):
        explained |= _explain(part, inner, of)
    return explained


def targets(node: ast.AST | None) -> set[str]:
    """Return the names that an assignment to a target binds, none for an attribute or an item."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Tuple | ast.List):
        return {name for part in node.elts for name in targets(part)}
    return targets(node.value) if isinstance(node, ast.Starred) else set()


def names_bound(target: ast.expr) -> Iterator[str]:
    """All names in a target, including those in `a.x` and `a[x]`."""
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


class Names:
    """Kinds of the values of all names in the cells of a run."""

    def __init__(
        self,
        bindings: Iterable[Mapping[str, Sequence[Binding]]],
        results: Iterable[str],
        *,
        star: bool,
    ) -> None:
        """Take the bindings of each cell; with `star` there may be others that are not visible."""
        self._bindings: dict[str, list[Binding]] = {}
        for of_cell in bindings:
            for name, bound in of_cell.items():
                self._bindings.setdefault(name, []).extend(bound)
        self._certain = not star and not {"zip", "enumerate"} & self._bindings.keys()
        self._kinds = dict.fromkeys(set(results) - self._bindings.keys(), Kind.RESULT)
        self._local: dict[str, Kind] = {}
        """Kinds of the variables of the current cell or comprehension."""

    def infer(self, wanted: set[str]) -> None:
        """Infer the kinds of some names, and of the names that they depend on."""
        relevant: set[str] = set()
        while wanted := {n for n in wanted if n in self._bindings} - relevant:
            relevant |= wanted
            wanted = {
                node.id
                for name in wanted
                for _, of in self._bindings[name]
                if isinstance(of, ast.expr)
                for node in ast.walk(of)
                if isinstance(node, ast.Name)
            }
        if self._certain:
            self._settle(self._kinds, {name: self._bindings[name] for name in relevant})

    @contextmanager
    def in_cell(self, own: Mapping[str, Sequence[Binding]]) -> Iterator[None]:
        """Use the cell's own bindings for names that it binds before reading them, `own`."""
        with self._with({}):
            if self._certain:
                self._settle(self._local, own)
            yield

    @contextmanager
    def in_comprehension(self, loops: Iterable[ast.comprehension]) -> Iterator[None]:
        """Give the variables of a comprehension the kinds of the elements that it iterates over."""
        own: dict[str, list[Binding]] = {}
        for loop in loops:
            explained = _explain(loop.target, How.ELEMENT, loop.iter)
            for node in ast.walk(loop.target):
                if isinstance(node, ast.Name):
                    own[node.id] = [explained.get(id(node), UNKNOWN)]
        with self._with(self._local):
            if self._certain:
                self._settle(self._local, own)
            yield

    @contextmanager
    def _with(self, local: Mapping[str, Kind]) -> Iterator[None]:
        before, self._local = self._local, dict(local)
        try:
            yield
        finally:
            self._local = before

    def _settle(self, kinds: dict[str, Kind], bound: Mapping[str, Sequence[Binding]]) -> None:
        """Infer the kinds of names that depend on each other, up to a fixed point."""
        kinds |= dict.fromkeys(bound, Kind.NOTHING_YET)
        changed = True
        while changed:  # kinds only ever become less certain, so this ends
            changed = False
            for name, bindings in bound.items():
                kind = _join(kinds[name], *(self._bound_to(binding) for binding in bindings))
                changed |= kind is not kinds[name]
                kinds[name] = kind

    def _bound_to(self, binding: Binding) -> Kind:
        how, of = binding
        if not isinstance(of, ast.expr):
            return Kind.OTHER
        if how is How.VALUE:
            return self._kept_value(of)
        kind = _element(self.kind(of))
        return _element(kind) if how is How.INNER else kind

    def _kept_value(self, node: ast.expr) -> Kind:
        """The kind of a name bound to an expression; its value may be changed or exhausted."""
        kind = self.kind(node)
        if isinstance(node, ast.GeneratorExp):
            return Kind.OTHER
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(called, ast.Attribute) and called.attr in pure_calls.ITERATORS:
            return Kind.OTHER
        if isinstance(node, ast.Call) and kind in (Kind.DATA, Kind.HOLDER):
            name = self.full_name(node.func).removeprefix("builtins.")
            options = {word.arg for word in node.keywords}
            if name in ("enumerate", "reversed", "zip") or options & {"chunksize", "iterator"}:
                return Kind.OTHER
            if name in ("dict", "list", "set", "sorted"):
                return Kind.HOLDER
            if isinstance(node.func, ast.Attribute) and node.func.attr in pure_calls.MODEL_METHODS:
                return Kind.OTHER
        fixed = not isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
        return kind if fixed else _join(kind, Kind.HOLDER)

    def full_name(self, node: ast.expr) -> str:
        """Full name: 'matplotlib.pyplot.plot', 'builtins.len'; '' if not certainly imported."""
        if isinstance(node, ast.Attribute):
            left = self.full_name(node.value)
            return f"{left}.{node.attr}" if left else ""
        if not isinstance(node, ast.Name):
            return ""
        bound = set(self._bindings.get(node.id, ()))
        if not bound:
            if not self._certain:
                return ""
            if node.id == "display":
                return "IPython.display.display"
            return f"builtins.{node.id}" if hasattr(builtins, node.id) else ""
        how, of = bound.pop()
        return of if how is How.IMPORT and not bound and isinstance(of, str) else ""

    def is_plotting(self, name: str) -> bool:
        """True if a name may be a module or function of a plotting package."""
        return any(
            how is How.IMPORT and str(of).partition(".")[0] in pure_calls.PLOTTING
            for how, of in self._bindings.get(name, ())
        )

    def kind(self, node: ast.AST) -> Kind:
        """The kind of an expression's value."""
        if isinstance(node, ast.Name):
            return self._local.get(node.id, self._kinds.get(node.id, Kind.OTHER))
        if isinstance(node, ast.Constant | ast.JoinedStr):
            return Kind.DATA
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            kind = self.kind(node.value)
            return kind if isinstance(node.slice, ast.Slice) else _element(kind)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return _group(*map(self.kind, node.elts))
        if isinstance(node, ast.Dict):
            return _group(*map(self.kind, [*filter(None, node.keys), *node.values]))
        if isinstance(node, COMPREHENSIONS):
            made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            with self.in_comprehension(node.generators):
                return _group(*map(self.kind, made))
        if isinstance(node, ast.BinOp):
            kind = _join(self.kind(node.left), self.kind(node.right))
            return kind if kind.value <= Kind.HOLDER.value else Kind.OTHER
        if isinstance(node, ast.UnaryOp):
            return self.kind(node.operand)
        if isinstance(node, ast.Compare):
            return _join(self.kind(node.left), *(self.kind(part) for part in node.comparators))
        if isinstance(node, ast.BoolOp):
            return _join(*(self.kind(part) for part in node.values))
        if isinstance(node, ast.IfExp):
            return _join(self.kind(node.body), self.kind(node.orelse))
        return self._call(node) if isinstance(node, ast.Call) else Kind.OTHER

    def _attribute(self, node: ast.Attribute) -> Kind:
        if self.full_name(node) == "tpunb.last_run":
            return Kind.RESULT
        kind = self.kind(node.value)
        if kind in (Kind.DATA, Kind.PLOT, Kind.NOTHING_YET):
            return kind
        if kind is Kind.RESULT and node.attr == "returns":
            return Kind.HOLDER
        return Kind.DATA if node.attr in ("dtype", "ndim", "shape", "__name__") else Kind.OTHER

    def _call(self, node: ast.Call) -> Kind:
        name = self.full_name(node.func)
        short = name.removeprefix("builtins.")
        given = _join(Kind.DATA, *(self.kind(part) for part in node.args))
        if name.startswith("builtins."):
            if short in pure_calls.LOOK_AT_ANYTHING - {"abs", "round", "type"}:
                return Kind.DATA
            if short in ("all", "any"):
                return Kind.DATA
            element = short in ("max", "min", "sum", "abs", "round")
            known = short in pure_calls.ITERATE or element
            most = Kind.DATA if element else Kind.HOLDER
            return given if known and given.value <= most.value else Kind.OTHER
        if name == "tpunb.runs.ended.read_run":
            return Kind.RESULT
        if pure_calls.draws(name) or name == "tpunb.plot":
            return Kind.PLOT
        if name in pure_calls.MAKE_DATA - pure_calls.MAKE_NO_DATA:
            return Kind.DATA
        if name.rpartition(".")[0] in pure_calls.MODULES:
            return Kind.DATA
        if self._makes_model(node.func, name):
            return Kind.MODEL
        if not isinstance(node.func, ast.Attribute):
            return Kind.OTHER
        method, kind = node.func.attr, self.kind(node.func.value)
        if kind is Kind.NOTHING_YET:
            return kind
        if kind is Kind.DATA:
            if self.is_drawn(node.func):
                return Kind.PLOT
            return Kind.DATA if method in pure_calls.MAKING_METHODS else Kind.OTHER
        if kind is Kind.HOLDER and method in ("copy", "items", "keys", "values"):
            return kind
        if kind is Kind.MODEL:
            if method in pure_calls.SAME_MODEL:
                return kind
            parts = method in pure_calls.MODEL_PARTS
            known = method in pure_calls.MODEL_METHODS
            return Kind.HOLDER if parts else Kind.DATA if known else Kind.OTHER
        if kind is Kind.RESULT:
            made = {"metrics": Kind.DATA, "plot": Kind.PLOT}
            return made.get(method, Kind.DATA if method in pure_calls.RESULT_METHODS else kind)
        return kind if kind is Kind.PLOT else Kind.OTHER

    def is_drawn(self, method: ast.Attribute) -> bool:
        """True for `table.plot`, `table.hist` or `table.plot.bar`."""
        if isinstance(method.value, ast.Attribute) and method.value.attr == "plot":
            return True
        return method.attr in pure_calls.PLOT_METHODS

    def _makes_model(self, function: ast.expr, name: str) -> bool:
        """True for torch.nn, torchvision.models, or a subclass of Module in the notebook."""
        if name.startswith(("torch.nn.", "torchvision.models.")):
            return not name.startswith("torch.nn.functional.")
        if not isinstance(function, ast.Name):
            return False
        bound = self._bindings.get(function.id, [])
        made = [of for _, of in bound if isinstance(of, ast.ClassDef) and of.bases]
        return len(made) == len(bound) > 0 and all(
            self.full_name(cls.bases[0]) == "torch.nn.Module" and not _own_methods(cls)
            for cls in made
        )


def _own_methods(node: ast.ClassDef) -> frozenset[str]:
    """Return the methods of a class that override those known to only read a model."""
    overriding = pure_calls.MODEL_METHODS | pure_calls.SAME_MODEL | {"__getattr__"}
    return overriding & {part.name for part in node.body if isinstance(part, Function)}


_ORDER = (Kind.NOTHING_YET, Kind.DATA, Kind.HOLDER)


def _join(*kinds: Kind) -> Kind:
    """Kind of a value that has one of these kinds."""
    known = set(kinds) - {Kind.NOTHING_YET}
    if len(known) <= 1:
        return known.pop() if known else Kind.NOTHING_YET
    return Kind.HOLDER if known <= set(_ORDER) else Kind.OTHER


def _group(*kinds: Kind) -> Kind:
    """Kind of a list of values of these kinds."""
    kind = _join(Kind.DATA, *kinds)
    return kind if kind is Kind.DATA else Kind.HOLDER


def _element(kind: Kind) -> Kind:
    return kind if kind in (Kind.DATA, Kind.PLOT, Kind.NOTHING_YET) else Kind.OTHER
