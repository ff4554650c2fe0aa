"""Statements of cells: what runs, what it binds, and edits that keep every line in its place.

Cells become parts of one file, so some statements have to change: `from __future__` imports,
`global` and `await` outside functions. None of the edits moves a line.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tpunb.notebook.errors import ConversionError

Function = ast.FunctionDef | ast.AsyncFunctionDef


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below `node` that run with it, in order of the source.

    Bodies of functions and lambdas do not; their decorators and defaults, and bodies of
    classes, do.
    """
    todo = list(ast.iter_child_nodes(node))[::-1]
    while todo:
        child = todo.pop()
        yield child
        if isinstance(child, Function):
            defaults = [part for part in child.args.kw_defaults if part is not None]
            todo += [*child.decorator_list, *child.args.defaults, *defaults][::-1]
        elif not isinstance(child, ast.Lambda):
            todo += list(ast.iter_child_nodes(child))[::-1]


def unconditional(tree: ast.Module) -> Iterator[ast.AST]:
    """As `executed`, without what stands below `if`, loops, `try` and the like."""
    simple = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.With, ast.Return)
    for statement in tree.body:
        if isinstance(statement, simple):
            yield from executed(statement)


def bound_anywhere(tree: ast.AST) -> set[str]:
    """All names that are assigned, imported or defined anywhere in a cell."""
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


def read_anywhere(tree: ast.AST) -> set[str]:
    """All names that are read anywhere in a cell."""
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FunctionOrClass = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Bindings:
    """Names that are bound in one scope."""

    names: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    """Declared `global`, here or in a function below."""
    changed: set[str] = field(default_factory=set)
    """Of `x += 1`, which makes a name local to a function, but needs it to be there."""
    outer: set[str] = field(default_factory=set)
    """Declared `nonlocal`."""
    stars: bool = False
    """Whether there is an `import *`."""


def bindings(nodes: Iterable[ast.AST]) -> Bindings:
    """What the nodes bind where they stand; bodies of functions and classes are their own.

    Not with `symtable`: since Python 3.12 its tables mix the names of comprehensions with those
    around them, and before they do not.
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
            # `:=` in a comprehension binds around it.
            todo += [part for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
        else:
            todo += ast.iter_child_nodes(node)
    return bound


def bound_names(tree: ast.AST) -> set[str]:
    """The names that a cell defines in the notebook, without those of `import *`."""
    bound = bindings(ast.iter_child_nodes(tree))
    return bound.names | bound.globals


def parameters(function: Function | ast.Lambda) -> set[str]:
    """The names of a function's parameters."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {arg.arg for arg in every if arg is not None}


def _inside(node: ast.AST, bound: Bindings) -> None:
    """The `global` statements anywhere in a scope below."""
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


def first_call_of_run(source: str) -> int | None:
    """The line of the first statement of a cell that calls `%%tpu_train` from code, from 1.

    Not of one that only defines a function. None also for a cell that is not plain Python.
    """
    if "run_cell_magic" not in source or "tpu_train" not in source:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    for statement in tree.body:
        for node in executed(ast.Module([statement], [])):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "run_cell_magic"
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and node.args[0].value == "tpu_train"
            ):
                return statement.lineno
    return None


class ImportedNames:
    """Names that are imported anywhere in some cells."""

    def __init__(self, trees: Iterable[ast.AST]) -> None:
        self._full: dict[str, str] = {}
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self._full[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._full[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def dotted(self, node: ast.expr) -> str:
        """The full name of an expression: 'torch_xla.core.xla_model.xla_device' for
        `xm.xla_device`; '' for what is not a name.
        """
        if isinstance(node, ast.Name):
            return self._full.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            left = self.dotted(node.value)
            return f"{left}.{node.attr}" if left else ""
        return ""


# How Python's own SyntaxError begins; it has no field for its kind.
ASYNC = ("'await' outside", "'async for' outside", "'async with' outside", "asynchronous compreh")
SKIP = "or tag the cell tpu-skip to leave it out of runs"


def parse_cell(source: str, number: int) -> ast.Module:
    """The tree of a cell. Raises ConversionError, which names the cell and the line."""
    with _in_words_for(source, number):
        return ast.parse(source)


def check_compiles(source: str, number: int, features: Iterable[str]) -> None:
    """Compile a cell under `from __future__ import` features. Raises ConversionError."""
    flags = 0
    for name in features:
        flags |= getattr(__future__, name).compiler_flag
    with _in_words_for(source, number):
        compile(source, f"<cell [{number}]>", "exec", flags, dont_inherit=True)


@contextmanager
def _in_words_for(source: str, number: int) -> Iterator[None]:
    try:
        yield
    except SyntaxError as error:
        raise _in_words(error, source, number) from None
    # Null characters and lone surrogates; nesting that the parser gives up on.
    except (ValueError, MemoryError, RecursionError, OverflowError) as error:
        raise ConversionError(f"Python cannot compile it: {error}", number) from error


def _in_words(error: SyntaxError, source: str, number: int) -> ConversionError:
    lines = source.split("\n")
    line = min(error.lineno, len(lines)) if error.lineno else None
    text = lines[line - 1] if line else ""
    message = error.msg or "invalid syntax"
    # Python gives its syntax errors no code: their text alone tells them.
    if message.startswith(ASYNC):
        reason = (
            "outside functions, `async for`, `async with` and the like only work in a notebook: "
            f"put it into an `async def f()` and write `await f()`, {SKIP}"
        )
    else:
        what = message if message.startswith("invalid") else f"invalid syntax: {message}"
        reason = f"{what}. Fix the syntax error; begin shell commands with !; {SKIP}"
    return ConversionError(reason, number, line, text)


def refuse_ipython_calls(tree: ast.Module, number: int, source: str, known: set[str]) -> None:
    """Raise ConversionError for uses of `get_ipython()` that are certain to fail in a script.

    `known` are the names that the notebook defines itself.
    """
    for node in unconditional(tree):
        reason = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            function = node.value.func
            special = node.attr.startswith("__")  # the class's name tells what kind of shell it is
            if (
                isinstance(function, ast.Name)
                and function.id == "get_ipython" not in known
                and not special
            ):
                reason = (
                    f"get_ipython().{node.attr} needs a notebook: there is no IPython in a "
                    f"run. Write it in Python, {SKIP}"
                )
        if reason is not None and isinstance(node, ast.expr):
            line = source.split("\n")[node.lineno - 1]
            raise ConversionError(reason, number, node.lineno, line)


Hoisted = ast.ImportFrom | ast.Global

HOISTED_WORDS = ("__future__", "global ")
"""Cells without these words hold no such statement."""


def hoist(source: str, tree: ast.Module) -> tuple[str, list[str]]:
    """A cell without `from __future__` imports and `global` outside functions; the features.

    The first must stand at the top of a file. The second says nothing outside functions, and
    in a script it is an error where the name was used above. The lines stay where they are.
    """
    features: list[str] = []
    hoisted: list[Hoisted] = []
    if not any(word in source for word in HOISTED_WORDS):
        return source, features
    for node in executed(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            names = [alias.name for alias in node.names]
            # A feature that does not exist stays, and compiling the cell will say so.
            if all(name in __future__.all_feature_names for name in names):
                features += names
                hoisted.append(node)
        elif isinstance(node, ast.Global) and not _in_class(tree, node):
            hoisted.append(node)
    lines = source.split("\n")
    for node in reversed(hoisted):
        if stands_alone(lines, node) and not node.col_offset:
            for index in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[index] = f"# {lines[index]}"
        else:
            replace_by_pass(lines, node)
    return "\n".join(lines), features


def _in_class(tree: ast.Module, node: ast.Global) -> bool:
    """In the body of a class, `global` does say something."""
    classes = [node_ for node_ in executed(tree) if isinstance(node_, ast.ClassDef)]
    return any(node in executed(node_) for node_ in classes)


def stands_alone(lines: list[str], node: ast.stmt) -> bool:
    """Whether a statement shares no line with others."""
    before, after = _around(lines, node)
    return not before.strip() and (not after.strip() or after.lstrip().startswith("#"))


def replace_by_pass(lines: list[str], node: ast.stmt) -> None:
    """Put `pass` in the place of a statement."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = _around(lines, node)
    lines[first] = f"{before}pass" + (after if first == last else "")
    for index in range(first + 1, last + 1):
        lines[index] = "#"
    if first != last:
        rest = after.lstrip().removeprefix(";").lstrip()
        indent = before if not before.strip() else before[: len(before) - len(before.lstrip())]
        lines[last] = f"{indent}{rest}" if rest else "#"


def _around(lines: list[str], node: ast.stmt) -> tuple[str, str]:
    """What stands on a statement's first line before it, and on its last line after it."""
    # Columns count bytes of UTF-8.
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode()
    return before, after


AWAIT_HELPER = "_await"


def rewrite_awaits(source: str, tree: ast.Module) -> str:
    """Replace `await` outside functions, which a script does not allow, by calls of `_await`.

    It becomes `_await(lambda: …)` in its place: the lambda is called while the script's own event
    loop runs, so what it makes may need a running loop. `async for`, `async with` and
    asynchronous comprehensions are refused: `async with` must be entered and left in one task (a
    time-out, a task group), which no line-for-line form does. Nothing else runs between two
    `await`s, whereas in a notebook tasks go on between cells.
    """
    awaits = [node for node in executed(tree) if isinstance(node, ast.Await)]
    marks: list[tuple[int, int, str, int]] = []
    for node in awaits:
        if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node)):
            continue  # the lambda would keep the name; compiling will refuse the cell
        assert node.end_lineno is not None and node.end_col_offset is not None
        # A loop that runs cannot be waited for, so what awaits others is made before it runs.
        nested = sum(isinstance(part, ast.Await) for part in ast.walk(node)) > 1
        begin = f"{AWAIT_HELPER}(" if nested else f"{AWAIT_HELPER}(lambda: "
        marks.append((node.lineno, node.col_offset, begin, len("await")))
        marks.append((node.end_lineno, node.end_col_offset, ")", 0))
    lines = [line.encode() for line in source.split("\n")]
    # Columns count bytes of UTF-8. What ends later in a line is put in first; at one place the
    # inner one of two ends comes first, and makes no difference.
    for line, column, text, taken in sorted(marks, reverse=True):
        row = lines[line - 1]
        rest = row[column + taken :].lstrip() if taken else row[column:]
        lines[line - 1] = row[:column] + text.encode() + rest
    return b"\n".join(lines).decode()
