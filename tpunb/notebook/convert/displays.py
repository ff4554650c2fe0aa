"""Find cells that only draw or display, which a run need not repeat.

A cell is left out only if that is certain. It stays if it calls a function that may have effects,
iterates over an object that may draw random numbers, or defines a name that the run reads later.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tpunb.notebook.convert import kinds, pure_calls
from tpunb.notebook.convert.kinds import Binding, Kind, Names, module_bindings, names_bound, targets
from tpunb.notebook.scopes import COMPREHENSIONS, Function

_READS_ANY = {"__builtins__", "eval", "exec", "globals", "locals", "vars"}
"""Names with which a cell may read any other."""
_STYLE = re.compile(r"\.(style\.use|rc|rcParams\b.*|set|set_theme|set_style|set_context|use)$")
_CERTAINLY_MORE = re.compile(r"^(@|(async|class|def|del|try|while)\b)", re.MULTILINE)
"""Start of a statement that does more than display."""
_WORD = re.compile(r"[^\W\d]\w*")
_MAGIC = re.compile(r"^# magic: (.*)$", re.MULTILINE)
_INCLUDED = re.compile(r"\b_tpunb_run_(file|module)\(")


def find_display_cells(
    sources: Sequence[str], prelude: Sequence[bool], results: Collection[str] = ()
) -> list[int]:
    """Return the indices of cells that can be left out because they only draw or display.

    `sources` are all code cells of the run in plain Python, in order; `prelude` is True for cells
    that may be left out; `results` are the names of results of other train cells.
    """
    may = [i for i in range(len(sources)) if prelude[i] and not _CERTAINLY_MORE.search(sources[i])]
    may = [i for i in may if _read_cell(sources[i]).may_only_display]
    if not may:
        return []  # analysing all cells takes longer than the rest of the conversion
    cells = [_read_cell(source) for source in sources]
    names = Names([cell.bindings for cell in cells], results, star=any(cell.star for cell in cells))
    names.infer({name for i in may for name in cells[i].names})
    checks: dict[int, _DisplayCheck] = {}
    for i in may:
        check, cell = _DisplayCheck(names), cells[i]
        with names.in_cell({n: how for n, how in cell.bindings.items() if n not in cell.reads}):
            if check.only_displays(cell.tree):
                checks[i] = check
    while needed := [i for i in checks if _is_needed(i, checks[i], cells, checks, names)]:
        for i in needed:
            del checks[i]
    return sorted(checks)


def _is_needed(
    index: int,
    check: _DisplayCheck,
    cells: Sequence[_Cell],
    left_out: Iterable[int],
    names: Names,
) -> bool:
    """True if a cell that stays reads a name of this cell, or may draw into its figure."""
    for i, cell in enumerate(cells):
        if i in left_out:
            continue
        read = cell.late | (cell.reads if i > index else frozenset())
        if check.bound & read or (check.bound and cell.reads_any):
            return True
        if check.draws and (cell.plots or any(names.is_plotting(name) for name in cell.used)):
            return True
    return False


@dataclass(frozen=True)
class _Cell:
    """Analysis of one cell, independent of the others."""

    tree: ast.Module
    may_only_display: bool
    bindings: Mapping[str, Sequence[Binding]]
    """Bindings of module-level names."""
    reads: frozenset[str]
    """Names that are read when it runs and that it may not have bound before; also the words in
    its strings, since pandas, formulas and SQL find variables by name."""
    late: frozenset[str]
    """Names that functions of the cell read when they are called."""
    reads_any: bool
    """True if it may read any name, as with `eval`."""
    used: frozenset[str]
    """Names that it uses for more than imports and style settings."""
    plots: bool
    """True if it uses a plotting method of tables."""
    star: bool
    """True if it may bind names that are not visible in the code."""
    names: frozenset[str]


@lru_cache(maxsize=4096)
def _read_cell(source: str) -> _Cell:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        # The next step of the conversion refuses the cell and reports why.
        tree = ast.parse("exec('what is no Python')")
    reads = _Reads()
    reads.block(tree.body, set())
    nodes = list(ast.walk(tree))
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    words = {word for text in [*texts, *_MAGIC.findall(source)] for word in _WORD.findall(text)}
    loaded = {n.id for n in nodes if isinstance(n, ast.Name)}
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return _Cell(
        tree=tree,
        may_only_display=_has_display_form(tree.body),
        bindings=module_bindings(tree),
        reads=frozenset(reads.now | words),
        late=frozenset(reads.late),
        reads_any=bool(loaded & _READS_ANY) or "__dict__" in attributes or "__main__" in words,
        used=frozenset(name for part in tree.body for name in _used(part)),
        plots=bool(attributes & pure_calls.PLOT_METHODS),
        star=kinds.bindings(tree.body).stars or _INCLUDED.search(source) is not None,
        names=frozenset(loaded),
    )


_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Pass)


def _has_display_form(body: Sequence[ast.stmt]) -> bool:
    """Quick test for statements of kinds that may only display."""
    return bool(body) and all(
        _has_display_form([*part.body, *getattr(part, "orelse", [])])
        if isinstance(part, ast.For | ast.With | ast.If)
        else isinstance(part, _SIMPLE)
        for part in body
    )


def _used(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return
    subject: ast.AST | None = None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        subject = statement.value.func
    elif isinstance(statement, ast.Assign):
        subject = statement.targets[0]
    if subject is None or not _STYLE.search(ast.unparse(subject)):
        yield from (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))


class _Reads:
    """Collects the names that a block reads before it has certainly bound them."""

    def __init__(self) -> None:
        self.now: set[str] = set()
        self.late: set[str] = set()

    def block(self, body: Sequence[ast.stmt], bound: set[str]) -> None:
        """Read statements in order; adds the names that they certainly bind to `bound`."""
        for part in body:
            self._statement(part, bound)

    def _statement(self, node: ast.stmt, bound: set[str]) -> None:
        if isinstance(node, ast.For | ast.AsyncFor):
            self._expression(node.iter, bound)
            self._expression(node.target, bound)
            self.block(node.body, bound | targets(node.target))
            self.block(node.orelse, set(bound))
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._expression(item, bound)
                bound |= targets(item.optional_vars)
            self.block(node.body, set(bound))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            self._expression(node, bound)
            if node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    bound |= targets(target)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, Function | ast.ClassDef):
            names = set(_names_read(node, frozenset()))
            self.late |= names
            self.now |= names - bound
            bound.add(node.name)
        elif isinstance(node, _SIMPLE):
            self._expression(node, bound)
        else:  # it is not known which parts of it run
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.stmt):
                    self._statement(part, set(bound))
                else:
                    self._expression(part, bound)
            if isinstance(node, ast.AugAssign | ast.Delete):
                self.now |= kinds.bound_anywhere(node) - bound

    def _expression(self, node: ast.AST, bound: set[str]) -> None:
        self.now |= set(_names_read(node, frozenset(bound)))
        for part in ast.walk(node):
            if isinstance(part, Function | ast.ClassDef | ast.Lambda | ast.GeneratorExp):
                self.late |= set(_names_read(part, frozenset()))


def _names_read(node: ast.AST, hidden: frozenset[str]) -> Iterator[str]:
    """Yield module-level names that a node reads, now or when it is called."""
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Store) and node.id not in hidden:
            yield node.id
        return
    if isinstance(node, COMPREHENSIONS):
        hidden |= {name for loop in node.generators for name in targets(loop.target)}
    elif isinstance(node, ast.Lambda):
        hidden |= kinds.parameters(node)
    elif isinstance(node, Function):
        bound = kinds.bindings(node.body)
        hidden |= (kinds.parameters(node) | bound.names | bound.changed) - bound.globals
    elif isinstance(node, ast.AugAssign):
        yield from targets(node.target) - hidden
    for part in ast.iter_child_nodes(node):
        yield from _names_read(part, hidden)


_READABLE = (Kind.DATA, Kind.HOLDER)
_DRAWABLE = (*_READABLE, Kind.PLOT)


@dataclass
class _DisplayCheck:
    """Decides whether one cell only displays."""

    names: Names
    bound: set[str] = field(default_factory=set)
    draws: bool = False
    displays: bool = False

    def only_displays(self, tree: ast.Module) -> bool:
        """True if no statement has an effect and at least one displays something."""
        return all(self._statement(part) for part in tree.body) and self.displays

    def _statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Expr):
            self.displays |= not isinstance(node.value, ast.Constant)
            return self._is_pure(node.value)
        if isinstance(node, ast.Assign):
            return all(self._bind(part) for part in node.targets) and self._is_pure(node.value)
        if isinstance(node, ast.AnnAssign):
            is_pure = node.value is not None and self._is_pure(node.value)
            return is_pure and self._bind(node.target)
        if isinstance(node, ast.For):
            is_pure = self._bind(node.target) and self._iterable(node.iter, _DRAWABLE)
            return is_pure and self._block([*node.body, *node.orelse])
        if isinstance(node, ast.If):
            return self._is_pure(node.test) and self._block([*node.body, *node.orelse])
        if isinstance(node, ast.With):
            return all(map(self._enters, node.items)) and self._block(node.body)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._imports(node)
        return isinstance(node, ast.Pass)

    def _block(self, body: Sequence[ast.stmt]) -> bool:
        return all(self._statement(part) for part in body)

    def _bind(self, target: ast.expr) -> bool:
        names = set(names_bound(target))
        self.bound |= names
        return names == targets(target)

    def _enters(self, item: ast.withitem) -> bool:
        call = item.context_expr
        return (
            item.optional_vars is None
            and isinstance(call, ast.Call)
            and self.names.full_name(call.func) in pure_calls.CONTEXTS
            and self._arguments(call, _READABLE)
        )

    def _imports(self, node: ast.Import | ast.ImportFrom) -> bool:
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = ["." if node.level else node.module or ""]
        tops = {module.partition(".")[0] for module in modules}
        self.draws |= bool(tops & set(pure_calls.PLOTTING))
        for alias in node.names:
            self.bound.add(alias.asname or alias.name.partition(".")[0])
        return tops <= set(pure_calls.IMPORTS)

    def _is_pure(self, node: ast.AST) -> bool:
        """True if evaluating an expression changes nothing."""
        if isinstance(node, ast.Constant | ast.Name):
            return True
        if isinstance(node, ast.Attribute | ast.FormattedValue | ast.JoinedStr | ast.Slice):
            return self._all_pure(ast.iter_child_nodes(node))
        if isinstance(node, ast.expr_context | ast.operator | ast.unaryop | ast.boolop):
            return True
        if isinstance(node, ast.Subscript):
            readable = self.names.kind(node.value) in _DRAWABLE
            return readable and self._is_pure(node.value) and self._is_pure(node.slice)
        if isinstance(node, ast.BinOp):
            kinds = (self.names.kind(node.left), self.names.kind(node.right))
            text = isinstance(node.left, ast.Constant) and isinstance(node.op, ast.Mod)
            known = text or all(kind in _READABLE for kind in kinds)
            return known and self._is_pure(node.left) and self._is_pure(node.right)
        if isinstance(node, ast.UnaryOp):
            known = isinstance(node.op, ast.Not) or self.names.kind(node.operand) in _READABLE
            return known and self._is_pure(node.operand)
        if isinstance(node, ast.Compare):
            searched = [
                part
                for op, part in zip(node.ops, node.comparators, strict=True)
                if isinstance(op, ast.In | ast.NotIn)
            ]
            known = all(self.names.kind(part) in _READABLE for part in searched)
            return known and self._all_pure([node.left, *node.comparators])
        if isinstance(node, COMPREHENSIONS):
            return self._comprehension(node)
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.BoolOp | ast.IfExp):
            return self._all_pure(ast.iter_child_nodes(node))
        return isinstance(node, ast.Call) and self._call(node)

    def _all_pure(self, nodes: Iterable[ast.AST]) -> bool:
        return all(self._is_pure(node) for node in nodes)

    def _iterable(self, node: ast.expr, kinds: Sequence[Kind]) -> bool:
        """True if iterating over an expression's value changes nothing."""
        if isinstance(node, ast.Call):
            name = self.names.full_name(node.func)
            if name in ("builtins.zip", "builtins.enumerate"):
                return not node.keywords and all(self._iterable(a, kinds) for a in node.args)
        return self.names.kind(node) in kinds and self._is_pure(node)

    def _comprehension(self, node: ast.AST) -> bool:
        assert isinstance(node, COMPREHENSIONS)
        made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        with self.names.in_comprehension(node.generators):
            return self._all_pure(made) and all(
                not loop.is_async
                and targets(loop.target) == set(names_bound(loop.target))
                and self._iterable(loop.iter, _READABLE)
                and self._all_pure(loop.ifs)
                for loop in node.generators
            )

    def _call(self, node: ast.Call) -> bool:
        name = self.names.full_name(node.func)
        short = name.removeprefix("builtins.")
        if name == "builtins.print":
            return self._shown(node) and all(
                w.arg in ("sep", "end", "flush") for w in node.keywords
            )
        if name.startswith("builtins."):
            if short in pure_calls.LOOK_AT_ANYTHING:
                return self._shown(node)
            options = all(word.arg in pure_calls.ITERATE_OPTIONS for word in node.keywords)
            iterated = all(self._iterable(part, _DRAWABLE) for part in node.args)
            return short in pure_calls.ITERATE and options and iterated
        if name.startswith("IPython.display."):
            return name in pure_calls.FUNCTIONS and self._shown(node)
        if name in pure_calls.FUNCTIONS or name.rpartition(".")[0] in pure_calls.MODULES:
            return self._arguments(node, _READABLE)
        if name == "tpunb.plot":
            return self._arguments(node, (*_READABLE, Kind.RESULT))
        if pure_calls.draws(name):
            self.draws = True
            return self._arguments(node, _DRAWABLE)
        return isinstance(node.func, ast.Attribute) and self._method(node, node.func)

    def _method(self, node: ast.Call, function: ast.Attribute) -> bool:
        method, value = function.attr, function.value
        kind = self.names.kind(value)
        if not self._is_pure(value):
            return False
        if kind is Kind.RESULT:
            reads = method in pure_calls.RESULT_METHODS
            return reads and self._arguments(node, (*_READABLE, Kind.RESULT))
        if kind is Kind.PLOT or (kind is Kind.DATA and self.names.is_drawn(function)):
            self.draws = True
            return pure_calls.draws_on(method) and self._arguments(node, _DRAWABLE)
        if isinstance(value, ast.Constant) and method == "format":
            return self._shown(node)
        known = {
            Kind.DATA: pure_calls.LOOKING_METHODS,
            Kind.HOLDER: pure_calls.HOLDER_METHODS,
            Kind.MODEL: pure_calls.MODEL_METHODS,
        }
        if method == "to_string" and node.args:
            return False  # the argument is a file to write
        return method in known.get(kind, ()) and self._arguments(node, _READABLE)

    def _shown(self, node: ast.Call) -> bool:
        """True if evaluating all arguments changes nothing, for functions that accept any value."""
        return all(
            self._iterable(part.value, _READABLE)
            if isinstance(part, ast.Starred)
            else self._is_pure(part)
            for part in node.args
        ) and all(word.arg is not None and self._is_pure(word.value) for word in node.keywords)

    def _arguments(self, node: ast.Call, kinds: Sequence[Kind]) -> bool:
        """True if all arguments are plain readable values, so that none of them is a function."""
        values = [part.value if isinstance(part, ast.Starred) else part for part in node.args]
        values += [word.value for word in node.keywords]
        options = {word.arg for word in node.keywords}
        return not options & pure_calls.CHANGING_OPTIONS and all(
            self.names.kind(value) in kinds and self._is_pure(value) for value in values
        )
