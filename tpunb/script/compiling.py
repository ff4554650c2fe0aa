"""Whether a cell is Python, and if not, why, in words."""

from __future__ import annotations
import __future__

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tpunb.errors import ConversionError
from tpunb.script import statements

ASYNC = ("'await' outside", "'async for' outside", "'async with' outside", "asynchronous compreh")
SKIP = "or tag the cell tpu-skip to leave it out of runs"


def parsed(source: str, number: int) -> ast.Module:
    """The tree of a cell. Raises ConversionError, which names the cell and the line."""
    with _in_words_for(source, number):
        return ast.parse(source)


def check(source: str, number: int, features: Iterable[str]) -> None:
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
    if message.startswith(ASYNC):
        reason = (
            "outside functions, `async for`, `async with` and the like work in a notebook only: "
            f"put it into an `async def f()` and write `await f()`, {SKIP}"
        )
    else:
        what = message if message.startswith("invalid") else f"invalid syntax: {message}"
        reason = f"{what}. Mend the cell; begin shell commands with !; {SKIP}"
    return ConversionError(reason, number, line, text)


def refuse_kernel_only(tree: ast.Module, number: int, source: str, known: set[str]) -> None:
    """Raise ConversionError for what cannot work in a script wherever it runs.

    `known` are the names that the notebook defines itself.
    """
    for node in statements.unconditional(tree):
        reason = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            made = node.value.func
            special = node.attr.startswith("__")  # the class's name tells what kind of shell it is
            if isinstance(made, ast.Name) and made.id == "get_ipython" not in known and not special:
                reason = (
                    f"get_ipython().{node.attr} needs a notebook: there is no IPython in a "
                    f"run. Write it in Python, {SKIP}"
                )
        if reason is not None and isinstance(node, ast.expr):
            line = source.split("\n")[node.lineno - 1]
            raise ConversionError(reason, number, node.lineno, line)
