"""Find the names that a train cell reads from the kernel, and how the cells above define them.

A static analysis, for the comparison of the kernel's values with those of the prelude
(`tpunb.worker.kernel_values`). Every name that may be read is included: a superfluous name is
compared and found equal. The meaning of a difference depends on how the name is defined:

- from literals alone, or by code that ran in the kernel and is not repeated in a run: the user
  has changed it, and the kernel's value is the intended one;
- in any other way, such as `list(set(labels))` or `int(os.environ["RANK"])`: the cells may give a
  different value in each process, and the other values of that process fit its own.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tpunb.notebook.capture.history import Execution
from tpunb.notebook.convert.cells import plain_python
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.statements import (
    COMPREHENSIONS,
    Function,
    FunctionOrClass,
    ImportedNames,
    bindings,
    executed,
    first_name,
    parameters,
)
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Script, Snapshot

PROCESS = (
    *("os.environ", "os.getenv", "os.getpid", "os.cpu_count", "os.sched_getaffinity", "sys"),
    *("get_ipython", "IPython", "platform", "socket", "multiprocessing", "psutil"),
    *("torch_xla", "torch.cuda", "torch.distributed", "torch.get_num_threads", "accelerate"),
)
"""Names whose values differ between a kernel, the prelude's process and a rank."""

_PURE = frozenset(
    "int float str bool complex tuple list dict range len min max sum abs round sorted pow divmod "
    "zip enumerate reversed".split()
)
_PURE_OF_MODULES = frozenset(
    "math.sqrt math.log math.log2 math.exp math.ceil math.floor pathlib.Path types.SimpleNamespace "
    "argparse.Namespace".split()
)
_NOT_CONSTANT = (*COMPREHENSIONS, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom)


@dataclass(frozen=True)
class ReadName:
    """A name that the train cell reads."""

    name: str
    cell: int | None
    """Number of the last prelude cell that defines it; None if no cell does."""
    certain: bool
    """See `tpunb.runs.kernel_values.KernelName`."""
    related: frozenset[str]
    """Names of the prelude from which it is derived, or that are derived from it."""
    of_process: bool
    """True if it may depend on values that differ between processes."""
    stale: tuple[int, ...]
    """Numbers of cells that ran in the kernel after it was last bound, but run earlier in a run."""


@dataclass(frozen=True)
class _Binding:
    """One definition or change of a name by a cell."""

    name: str
    values: tuple[ast.expr, ...]
    """Expressions that it depends on: the value, and the conditions around it."""
    definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None
    updates: bool = False
    """True if it changes an existing value: `x += 1`, `x["a"] = 1`, `x.append(1)`."""
    imports: bool = False

    @cached_property
    def mentions(self) -> frozenset[str]:
        """All names in it."""
        return frozenset(node.id for node in _nodes_of(self) if isinstance(node, ast.Name))


def names_read(
    script: Script, snapshot: Snapshot, executions: Sequence[Execution]
) -> tuple[ReadName, ...]:
    """Return the names that the script's train cell may read, in the order of first use.

    `executions` are all executions of this kernel, in order.
    """
    prelude = [block for block in script.blocks if block.role == "prelude"]
    train = [block for block in script.blocks if block.role == "train"]
    cells = [_Cell(block.number, script.source(block)) for block in prelude]
    raw = [snapshot.cells[block.cell].source for block in prelude if block.cell is not None]
    notebook = _Notebook(cells, _Past(executions, raw))
    found = dict.fromkeys(
        name for block in train for name in notebook.reached(_free_names(script.source(block)))
    )
    return tuple(notebook.describe(name) for name in found if notebook.is_value(name))


class _Cell:
    """A cell of the prelude."""

    def __init__(self, number: int | None, source: str) -> None:
        self.number = number
        self.tree = _tree(source)
        self.imports = "import" in source
        self.bindings = _bindings_of(source)
        self.reads = _names_loaded(source)


class _Notebook:
    """The prelude: how each name is defined, and the conclusions from that."""

    def __init__(self, cells: list[_Cell], past: _Past) -> None:
        self._cells = cells
        self._past = past
        self._made: dict[str, list[tuple[int, _Binding]]] = {}
        """Cell index and binding of each definition, by name."""
        for index, cell in enumerate(cells):
            for binding in cell.bindings:
                self._made.setdefault(binding.name, []).append((index, binding))
        self._constants: dict[str, bool] = {}

    def is_value(self, name: str) -> bool:
        """True if it may be a value; functions and modules are the same as in the kernel."""
        made = self._made.get(name, [])
        functions = (
            binding.imports or isinstance(binding.definition, Function) for _, binding in made
        )
        return not made or not all(functions)

    def reached(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names, and the names read by functions and methods that they may call."""
        seen: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop(0)
            if name in seen:
                continue
            seen.add(name)
            yield name
            for _, binding in self._made.get(name, ()):
                todo += self._read_later(binding, set())

    def _read_later(self, binding: _Binding, entered: set[str]) -> Iterator[str]:
        """Yield the names read by code that a value contains: a function, a lambda, methods."""
        if binding.definition is not None:
            yield from _free_in_definition(binding.definition)
            return
        for value in binding.values:
            for node in ast.walk(value):
                if isinstance(node, ast.Lambda):
                    yield from _loaded(node.body, frozenset(parameters(node)))
                elif isinstance(node, ast.Name) and node.id not in entered:
                    entered.add(node.id)
                    yield from self._of_maker(node.id, entered)

    def _of_maker(self, name: str, entered: set[str]) -> Iterator[str]:
        """Yield the names read by methods of a value's class; `name` is the class or a maker."""
        for _, binding in self._made.get(name, ()):
            made = binding.definition
            if isinstance(made, ast.ClassDef):
                yield name
                yield from _free_in_definition(made)
            elif made is not None:
                for inner in _free_in_definition(made):
                    if inner not in entered:
                        entered.add(inner)
                        yield from self._of_maker(inner, entered)
            else:
                yield from self._read_later(binding, entered)

    def describe(self, name: str) -> ReadName:
        made = self._made.get(name, [])
        if not made:
            return ReadName(name, None, True, frozenset(), of_process=False, stale=())
        changed = self._past.changed(name)
        certain = changed or self._constant(name)
        return ReadName(
            name,
            self._cells[made[-1][0]].number,
            certain,
            frozenset() if certain else self._related(name),
            not certain and self._of_process(name),
            self._stale(name, made) if certain else (),
        )

    def _constant(self, name: str) -> bool:
        """True if a name is defined from literals alone, or from names that are."""
        if name not in self._constants:
            self._constants[name] = False  # a name defined only from itself is not constant
            made = self._made.get(name, [])
            self._constants[name] = bool(made) and all(
                self._constant_binding(binding) for _, binding in made
            )
        return self._constants[name]

    def _constant_binding(self, binding: _Binding) -> bool:
        if binding.imports or isinstance(binding.definition, Function):
            return False
        own = binding.name if binding.updates else ""
        return all(self._constant_value(value, own) for value in binding.values)

    def _constant_value(self, value: ast.expr, own: str) -> bool:
        nodes = list(ast.walk(value))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        functions = {id(part) for call in calls for part in ast.walk(call.func)}
        if any(isinstance(node, _NOT_CONSTANT) for node in nodes):
            return False
        if calls and any(isinstance(node, ast.Set) for node in nodes):
            return False  # the result may depend on the set's order
        return all(self._is_pure(call, own) for call in calls) and all(
            node.id == own or self._constant(node.id)
            for node in nodes
            if isinstance(node, ast.Name) and id(node) not in functions
        )

    def _is_pure(self, call: ast.Call, own: str) -> bool:
        """True if a call gives equal results for equal arguments; methods of `own` count."""
        name = self._imports.dotted(call.func)
        return (
            (name in _PURE and name not in self._made)
            or name in _PURE_OF_MODULES
            or self._is_class(name)
            or _method_of(call) == own != ""
        )

    def _is_class(self, name: str) -> bool:
        """True for a class of settings, which defines no methods."""
        made = [binding.definition for _, binding in self._made.get(name, ())]
        return bool(made) and all(
            isinstance(node, ast.ClassDef)
            and not any(isinstance(part, Function) for part in node.body)
            for node in made
        )

    @cached_property
    def _imports(self) -> ImportedNames:
        return ImportedNames(cell.tree for cell in self._cells if cell.imports)

    @cached_property
    def _made_of(self) -> dict[str, set[str]]:
        """The names of the prelude on which each name depends directly, including functions."""
        return {
            name: {
                source for _, binding in made for source in binding.mentions if source in self._made
            }
            for name, made in self._made.items()
        }

    @cached_property
    def _made_from(self) -> dict[str, set[str]]:
        """The inverse of `_made_of`: the names that depend on each name directly."""
        found: dict[str, set[str]] = {}
        for name, sources in self._made_of.items():
            for source in sources:
                found.setdefault(source, set()).add(name)
        return found

    def _sources(self, name: str) -> set[str]:
        """Return the names of the prelude on which a name depends, directly or indirectly."""
        return _closure(name, self._made_of)

    def _related(self, name: str) -> frozenset[str]:
        every = self._sources(name) | _closure(name, self._made_from)
        return frozenset(other for other in every - {name} if self.is_value(other))

    def _of_process(self, name: str) -> bool:
        for maker in {name, *self._sources(name)}:
            for _, binding in self._made.get(maker, ()):
                node: ast.AST
                for node in _nodes_of(binding):
                    if isinstance(node, ast.Name | ast.Attribute):
                        dotted = f"{self._imports.dotted(node)}."
                        if dotted.startswith(tuple(f"{known}." for known in PROCESS)):
                            return True
        return False

    def _stale(self, name: str, made: list[tuple[int, _Binding]]) -> tuple[int, ...]:
        """Return cells below its definition that ran in the kernel after it was last bound."""
        if any(binding.updates for _, binding in made):
            return ()
        return tuple(
            cell.number
            for index, cell in enumerate(self._cells)
            if index > made[-1][0]
            and name in cell.reads
            and cell.number is not None
            and self._past.ran_after_binding(index, name)
        )


def _closure(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Return all names that can be reached from a name."""
    found: set[str] = set()
    todo = [name]
    while todo:
        new = edges.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


class _Past:
    """The executions in the kernel, in order, compared with the cells of the prelude."""

    def __init__(self, executions: Sequence[Execution], prelude: Sequence[str]) -> None:
        self._ran = [run.source for run in executions]
        self._prelude = prelude

    @cached_property
    def _bound(self) -> list[frozenset[str]]:
        return [_bound_by(source) for source in self._ran]

    @cached_property
    def _by_functions(self) -> frozenset[str]:
        """Names that functions may bind when called, at an unknown time."""
        return frozenset(name for source in set(self._ran) for name in _bound_in_functions(source))

    def _last(self, name: str) -> int | None:
        """Return the index of the last execution that bound a name."""
        at = [index for index, bound in enumerate(self._bound) if name in bound]
        return at[-1] if at else None

    def changed(self, name: str) -> bool:
        """True if the kernel's executions defined a name differently from the cells of a run."""
        return self._in_kernel.get(name) != self._in_run.get(name)

    @cached_property
    def _in_kernel(self) -> Mapping[str, int]:
        return _versions(self._ran)

    @cached_property
    def _in_run(self) -> Mapping[str, int]:
        return _versions(self._prelude)

    def ran_after_binding(self, cell: int, name: str) -> bool:
        """True if a prelude cell was certainly executed after a name was last bound."""
        last = self._last(name)
        if last is None or cell >= len(self._prelude) or name in self._by_functions:
            return False
        return self._prelude[cell] in self._ran[last + 1 :]


# --- Analysis of single cells. Results are cached: most texts are the same in the next run. ---


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warned about the cells when they ran
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return ast.Module([], [])


@lru_cache(maxsize=4096)
def _tree(source: str) -> ast.Module:
    return _parsed(source)


@lru_cache(maxsize=4096)
def _bindings_of(source: str) -> tuple[_Binding, ...]:
    return _all_bindings(source, _tree(source))


@lru_cache(maxsize=4096)
def _names_loaded(source: str) -> frozenset[str]:
    """Return the names that a cell reads when it runs, outside of functions."""
    return frozenset(_loaded(_tree(source), frozenset()))


@lru_cache(maxsize=4096)
def _raw_tree(source: str) -> ast.Module:
    """Return the tree of a cell as the user wrote it; empty for train cells and invalid cells."""
    if "tpu_train" in cell_magics(source):
        return ast.Module([], [])
    try:
        return _tree("\n".join(plain_python(source).lines))
    except NotPythonError:
        return ast.Module([], [])


@lru_cache(maxsize=4096)
def _raw_bindings(source: str) -> tuple[_Binding, ...]:
    return _all_bindings(source, _raw_tree(source))


def _all_bindings(source: str, tree: ast.Module) -> tuple[_Binding, ...]:
    found = list(_bindings(tree.body, ()))
    if ":=" in source:
        found += [
            _Binding(node.target.id, (node.value,))
            for node in executed(tree)
            if isinstance(node, ast.NamedExpr)
        ]
    return tuple(found)


@lru_cache(maxsize=4096)
def _bound_by(source: str) -> frozenset[str]:
    return frozenset(binding.name for binding in _raw_bindings(source))


@dataclass(frozen=True)
class _Effect:
    """Names that the execution of a cell reads and binds."""

    needs: frozenset[str]
    """Names that it reads before it binds them, or may leave unchanged."""
    bound: frozenset[str]
    later: Mapping[str, frozenset[str]]
    """Names read by each function and class that it defines."""


@lru_cache(maxsize=4096)
def _effect(source: str) -> _Effect:
    reader, surely = _Reader(), set[str]()
    reader.read(_raw_tree(source).body, surely)
    bound = _bound_by(source)
    later = {name: frozenset(names) for name, names in reader.functions.items()}
    return _Effect(frozenset(reader.found) | (bound - surely), bound, later)


def _versions(sources: Iterable[str]) -> dict[str, int]:
    """Return a number for each name that identifies how it was defined, in this execution order.

    Equal numbers mean: by the same cell, from names that were defined in the same way.
    """
    versions: dict[str, int] = {}
    later: dict[str, frozenset[str]] = {}
    for source in sources:
        effect = _effect(source)
        needs, todo = set[str](), list(effect.needs)
        while todo:
            name = todo.pop()
            if name not in needs:
                needs.add(name)
                todo += later.get(name, ())
        made = hash((source, *((name, versions.get(name)) for name in sorted(needs))))
        for name in effect.bound:
            versions[name] = hash((name, made))
            later[name] = effect.later.get(name, frozenset())
    return versions


@lru_cache(maxsize=4096)
def _bound_in_functions(source: str) -> frozenset[str]:
    return frozenset(
        name
        for node in ast.walk(_raw_tree(source))
        if isinstance(node, ast.Global)
        for name in node.names
    )


def _bindings(body: Sequence[ast.stmt], around: tuple[ast.expr, ...]) -> Iterator[_Binding]:
    """Yield how module-level statements bind names; `around` are the conditions around them."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _assigned(target, node.value, around)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _assigned(node.target, node.value, around)
        elif isinstance(node, ast.AugAssign):
            if name := first_name(node.target):
                yield _Binding(name, (node.value, *around), updates=True)
        elif isinstance(node, FunctionOrClass):
            values = (*_class_values(node), *around)
            yield _Binding(node.name, values, definition=node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                yield _Binding(name, (), imports=True)
        elif isinstance(node, ast.For | ast.AsyncFor):
            yield from _assigned(node.target, node.iter, around)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if item.optional_vars is not None:
                    yield from _assigned(item.optional_vars, item.context_expr, around)
        elif isinstance(node, ast.Expr) and (name := _method_of(node.value)):
            yield _Binding(name, (node.value, *around), updates=True)
        if not isinstance(node, FunctionOrClass):
            inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            outer = isinstance(node, ast.If | ast.While | ast.For)
            conditions = (*around, *inner[:1]) if outer else around
            for name in ("body", "orelse", "finalbody"):
                yield from _bindings(getattr(node, name, ()), conditions)
            for handler in getattr(node, "handlers", ()):
                yield from _bindings(handler.body, conditions)


def _assigned(
    target: ast.expr, value: ast.expr, around: tuple[ast.expr, ...]
) -> Iterator[_Binding]:
    if isinstance(target, ast.Name):
        yield _Binding(target.id, (value, *around))
    elif isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        each = parts if len(parts) == len(target.elts) else [value] * len(target.elts)
        for inner, part in zip(target.elts, each, strict=True):
            yield from _assigned(inner, part, around)
    elif isinstance(target, ast.Starred):
        yield from _assigned(target.value, value, around)
    else:
        if name := first_name(target):
            yield _Binding(name, (value, *around), updates=True)


def _method_of(node: ast.AST) -> str:
    """Return the name `x` in a call `x.method(…)` or `x.y.method(…)`; '' for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return first_name(node.func)
    return ""


def _class_values(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the values assigned in a class's body."""
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
                yield part.value


def _nodes_of(binding: _Binding) -> Iterator[ast.AST]:
    for value in binding.values:
        yield from ast.walk(value)
    if binding.definition is not None:
        yield from ast.walk(binding.definition)


def _free_in_definition(node: ast.stmt) -> set[str]:
    """Return the module-level names that a function's body, or a class's methods, read."""
    if isinstance(node, Function):
        return set(_loaded_in_function(node, frozenset()))
    return {
        name
        for part in ast.iter_child_nodes(node)
        if isinstance(part, Function)
        for name in _loaded_in_function(part, frozenset())
    }


def _loaded_in_function(function: Function, hidden: frozenset[str]) -> Iterator[str]:
    bound = bindings(function.body)
    declared = {
        name for part in ast.walk(function) if isinstance(part, ast.Global) for name in part.names
    }
    own = (parameters(function) | bound.names | bound.changed | bound.outer) - declared
    for part in function.body:
        yield from _loaded(part, hidden | own, deep=True)


def _loaded(node: ast.AST, hidden: frozenset[str], *, deep: bool = False) -> Iterator[str]:
    """Yield the names that a node reads, except variables of its comprehensions and lambdas.

    `deep` includes functions that are defined in it.
    """
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Store) and node.id not in hidden:
            yield node.id
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        if node.target.id not in hidden:
            yield node.target.id
    elif isinstance(node, COMPREHENSIONS):
        hidden |= bindings([loop.target for loop in node.generators]).names
    elif isinstance(node, ast.Lambda):
        hidden |= parameters(node)
    elif isinstance(node, Function):
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                yield from _loaded(part, hidden)
        if deep:
            yield from _loaded_in_function(node, hidden)
        return
    for child in ast.iter_child_nodes(node):
        yield from _loaded(child, hidden, deep=deep)


def _free_names(source: str) -> list[str]:
    """Return the names that a train cell may read before it binds them itself."""
    reader = _Reader()
    reader.read(_tree(source).body, set())
    return list(reader.found)


class _Reader:
    """Collects the names that a cell reads before it binds them."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.functions: dict[str, list[str]] = {}
        """The cell's own functions, and the names they read when called."""

    def read(self, body: Sequence[ast.stmt], bound: set[str]) -> None:
        """Process statements; `bound`, the names bound so far, is extended."""
        for node in body:
            self._statement(node, bound)

    def _statement(self, node: ast.stmt, bound: set[str]) -> None:
        if isinstance(node, Function):
            self.functions[node.name] = [*_loaded_in_function(node, frozenset())]
            self._names(_loaded(node, frozenset()), bound)
            bound.add(node.name)
            if node.decorator_list:  # a decorator may call the function
                self._names(iter([node.name]), set())
        elif isinstance(node, ast.ClassDef):
            self.functions[node.name] = [*_free_in_definition(node)]
            for part in (*node.decorator_list, *node.bases, *node.keywords):
                self._names(_loaded(part, frozenset()), bound)
            inner = set(bound)
            for part in node.body:
                if isinstance(part, Function):
                    self._names(_loaded(part, frozenset()), inner)
                else:
                    self._statement(part, inner)
            bound.add(node.name)
        elif isinstance(node, ast.If):
            self._names(_loaded(node.test, frozenset()), bound)
            branches = [set(bound), set(bound)]
            self.read(node.body, branches[0])
            self.read(node.orelse, branches[1])
            bound |= branches[0] & branches[1]
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._names(_loaded(node.iter, frozenset()), bound)
            bound |= bindings([node.target]).names
            self.read(node.body, set(bound))
            self.read(node.orelse, set(bound))
        elif isinstance(node, ast.While):
            self._names(_loaded(node.test, frozenset()), bound)
            self.read(node.body, set(bound))
            self.read(node.orelse, set(bound))
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._names(_loaded(item, frozenset()), bound)
                bound |= bindings([item]).names
            self.read(node.body, bound)
        elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":  # new in Python 3.11
            tried = set(bound)
            self.read(node.body, tried)  # type: ignore[attr-defined]
            for handler in node.handlers:  # type: ignore[attr-defined]
                named = {handler.name} if handler.name else set()
                self.read(handler.body, bound | named)
            self.read(node.orelse, tried)  # type: ignore[attr-defined]
            self.read(node.finalbody, set(bound))  # type: ignore[attr-defined]
            bound |= tried
        else:
            self._names(_loaded(node, frozenset()), bound)
            bound |= bindings([node]).names - bindings([node]).globals

    def _names(self, names: Iterator[str], bound: set[str]) -> None:
        todo, entered = list(names), set()
        while todo:
            name = todo.pop(0)
            if name in self.functions and name not in entered:
                entered.add(name)
                todo += self.functions[name]
            if name not in bound and name not in self.functions:
                self.found[name] = None
