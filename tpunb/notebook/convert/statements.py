"""Statements of cells: which nodes run, which names they bind, and edits that move no line.

Cells become parts of one file, so some statements must change: `from __future__` imports,
`global` and `await` outside functions.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tpunb.notebook.convert.syntax import parsed
from tpunb.notebook.errors import ConversionError
from tpunb.notebook.scopes import Function, ParsedCell, Scopes, dotted, literal


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` that run with it, in source order.

    Bodies of functions and lambdas are excluded; their decorators and defaults, and bodies of
    classes, are included.
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


def first_call_of_run(source: str) -> int | None:
    """Return the line (from 1) of a cell's first statement that calls `%%tpu_train` from code.

    Definitions of functions do not count. None also for a cell that is not plain Python.
    """
    if "run_cell_magic" not in source or "tpu_train" not in source:
        return None
    tree = parsed([source])
    for statement in tree.body if tree else ():
        for node in executed(ast.Module([statement], [])):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "run_cell_magic"
                and node.args
                and literal(node.args[0]) == "tpu_train"
            ):
                return statement.lineno
    return None


SKIP = "or tag the cell tpu-skip to leave it out of runs"


def parse_cell(source: str, number: int) -> ast.Module:
    """Parse a cell. Raises ConversionError, which names the cell and the line."""
    with _conversion_errors(source, number):
        return ast.parse(source)


def check_compiles(source: str, number: int, features: Iterable[str]) -> None:
    """Compile a cell under `from __future__ import` features. Raises ConversionError."""
    flags = 0
    for name in features:
        flags |= getattr(__future__, name).compiler_flag
    with _conversion_errors(source, number):
        try:
            compile(source, f"<cell [{number}]>", "exec", flags, dont_inherit=True)
        except SyntaxError as error:
            if not _compiles_in_ipython(source, flags):
                raise
            reason = (
                "outside functions, `async for`, `async with` and similar only work in a notebook: "
                f"put it into an `async def f()` and write `await f()`, {SKIP}"
            )
            raise _located(error, source, number, reason) from None


def _compiles_in_ipython(source: str, flags: int) -> bool:
    """Whether a cell is valid if `await` and the like may stand outside functions."""
    try:
        flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile(source, "<cell>", "exec", flags, dont_inherit=True)
    except SyntaxError:
        return False
    return True


@contextmanager
def _conversion_errors(source: str, number: int) -> Iterator[None]:
    try:
        yield
    except SyntaxError as error:
        reason = f"it is not Python: {error.msg}. Fix the syntax error; begin shell commands with !"
        raise _located(error, source, number, f"{reason}; {SKIP}") from None
    # Null characters, lone surrogates, and nesting that is too deep for the parser.
    except (ValueError, MemoryError, RecursionError, OverflowError) as error:
        raise ConversionError(f"Python cannot compile it: {error}", number) from error


def _located(error: SyntaxError, source: str, number: int, reason: str) -> ConversionError:
    lines = source.split("\n")
    line = min(error.lineno, len(lines)) if error.lineno else None
    return ConversionError(reason, number, line, lines[line - 1] if line else "")


def refuse_ipython_calls(cell: ParsedCell, scopes: Scopes) -> None:
    """Raise ConversionError for uses of `get_ipython()` that are certain to fail in a script."""
    for site in scopes.attributes():
        node = site.node
        assert isinstance(node, ast.Attribute)
        special = node.attr.startswith("__")  # `__class__` is used to identify the shell
        if (
            site.cell is cell
            and isinstance(node.value, ast.Call)
            and dotted(node.value.func) == "get_ipython"
            and site.scope.find("get_ipython") is None
            and not special
            and site.ends_cell()
        ):
            reason = (
                f"get_ipython().{node.attr} needs a notebook: there is no IPython in a "
                f"run. Write it in Python, {SKIP}"
            )
            raise ConversionError(reason, cell.number, node.lineno, cell.lines[node.lineno - 1])


Hoisted = ast.ImportFrom | ast.Global

HOISTED_WORDS = ("__future__", "global ")
"""Cells without these words contain no such statement."""


def hoist(source: str, tree: ast.Module) -> tuple[str, list[str]]:
    """Remove `from __future__` imports and `global` outside functions; also return the features.

    The imports must be at the top of a file. `global` has no effect outside functions, and in a
    script it is an error if the name was used above. No line is moved.
    """
    features: list[str] = []
    hoisted: list[Hoisted] = []
    if not any(word in source for word in HOISTED_WORDS):
        return source, features
    for node in executed(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            names = [alias.name for alias in node.names]
            # An import of an unknown feature stays, so that compiling the cell reports it.
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
    """True if `global` is in the body of a class, where it has an effect."""
    classes = [node_ for node_ in executed(tree) if isinstance(node_, ast.ClassDef)]
    return any(node in executed(node_) for node_ in classes)


def stands_alone(lines: list[str], node: ast.stmt) -> bool:
    """True if a statement shares no line with other statements."""
    before, after = _around(lines, node)
    return not before.strip() and (not after.strip() or after.lstrip().startswith("#"))


def replace_by_pass(lines: list[str], node: ast.stmt) -> None:
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
    """Return the text before a statement on its first line and after it on its last line."""
    # Columns count bytes of UTF-8.
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode()
    return before, after


AWAIT_HELPER = "_tpunb_await"
TASK_HELPER = "_tpunb_in_loop"
"""Function next to `_tpunb_await` that calls another function while the event loop is running."""
TASK_FUNCTIONS = ("asyncio.create_task", "asyncio.ensure_future", "asyncio.gather")
"""Functions that need a running event loop."""
TASK_WORDS = ("create_task", "ensure_future", "asyncio.gather")
"""Cells without these words do not call them."""


def rewrite_awaits(source: str, tree: ast.Module, names: Scopes) -> str:
    """Replace `await` outside functions, which a script does not allow, by `_tpunb_await`.

    It becomes `_tpunb_await(lambda: …)` in place. The lambda is called while the script's own
    event loop is running, so its code may need a running loop. `async for`, `async with` and
    asynchronous comprehensions are refused: `async with` must be entered and left in one task (a
    time-out, a task group), which is impossible line for line. Nothing else runs between two
    `await`s, whereas in a notebook tasks continue between cells.

    `asyncio.create_task(f())` becomes `_tpunb_in_loop(asyncio.create_task, f())`, except in a
    lambda of `_tpunb_await`.
    """
    awaits = [node for node in executed(tree) if isinstance(node, ast.Await)]
    marks: list[tuple[int, int, str, int]] = []
    in_loop: set[ast.AST] = set()
    for node in awaits:
        if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node)):
            continue  # the lambda would make the name local; compiling refuses the cell
        assert node.end_lineno is not None and node.end_col_offset is not None
        # A running loop cannot be run again, so an expression with further awaits is evaluated
        # before the loop starts.
        nested = sum(isinstance(part, ast.Await) for part in ast.walk(node)) > 1
        in_loop.update(() if nested else executed(node))
        begin = f"{AWAIT_HELPER}(" if nested else f"{AWAIT_HELPER}(lambda: "
        marks.append((node.lineno, node.col_offset, begin, len("await")))
        marks.append((node.end_lineno, node.end_col_offset, ")", 0))
    lines = [line.encode() for line in source.split("\n")]
    for call in executed(tree):
        if not isinstance(call, ast.Call) or call in in_loop or not call.args:
            continue
        function = call.func
        name = names.full_or_written(function, names.globals)
        if name in TASK_FUNCTIONS and function.end_lineno is not None:
            bracket = lines[function.end_lineno - 1].find(b"(", function.end_col_offset)
            if bracket >= 0:
                marks.append((function.lineno, function.col_offset, f"{TASK_HELPER}(", 0))
                marks.append((function.end_lineno, bracket, ", ", 1))
    # Columns count bytes of UTF-8. Later positions are edited first; the order of two ends at the
    # same position makes no difference.
    for line, column, text, taken in sorted(marks, reverse=True):
        row = lines[line - 1]
        rest = row[column + taken :].lstrip() if taken else row[column:]
        lines[line - 1] = row[:column] + text.encode() + rest
    return b"\n".join(lines).decode()
