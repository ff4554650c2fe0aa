"""IPython's special syntax in cells, found by IPython's own transformers.

The only module that names IPython's input transformers. Their classes and methods are
documented for people who write transformers; not documented, and watched by a test, are
`start_line` and `start_col` of their base class and `_find_assign_op` (IPython 7.34 to 9.18).
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

Kind = Literal["magic", "shell", "capture", "help", "call", "cell"]


METHODS: dict[str, Kind] = {"system": "shell", "getoutput": "capture", "show_usage": "help"}
"""Of `get_ipython()`, besides `run_line_magic`: what special syntax is translated to."""


@dataclass(frozen=True)
class Special:
    """One use of special syntax in a cell."""

    kind: Kind
    """`%magic`, `!command`, a command whose output is wanted, `help?`, or an automatic call
    (`,f a b`), which is plain Python once it is translated. A call of a cell magic is "cell"."""
    line: int
    """Index of its first line, from 0."""
    count: int
    """How many lines it takes (it may be continued with backslashes)."""
    before: str
    """What stands on its first line before it: an indentation, or `x = `."""
    name: str
    """The name of a magic, without %."""
    argument: str
    """What follows the name of a magic; the command of a shell line."""
    python: str
    """The Python code that IPython makes of it."""

    @property
    def assigns(self) -> bool:
        """Whether its value is assigned: `x = %magic`."""
        return bool(self.before.strip())


@cache
def _ipython() -> tuple[Any, list[Any]]:
    """IPython's module of transformers, and the ones that find special syntax in tokens."""
    from IPython.core import inputtransformer2 as transformers

    kinds = list(transformers.TransformerManager().token_transformers)
    if sys.version_info >= (3, 12) and not hasattr(transformers.SystemAssign, "find_post_312"):
        kinds.append(_shell_assignment(transformers))
    return transformers, kinds


def _shell_assignment(transformers: Any) -> Any:
    """`x = !command` for IPython 7 and early 8 on Python 3.12 and later (Colab has such).

    There the mark is an operator and no longer the error token that IPython looks for.
    """

    class ShellAssignment(transformers.SystemAssign):  # type: ignore[misc]
        @classmethod
        def find(cls, tokens_by_line: list[list[tokenize.TokenInfo]]) -> Any:
            for line in tokens_by_line:
                at = transformers._find_assign_op(line)
                if at is not None and [token.string for token in line[at + 1 : at + 2]] == ["!"]:
                    return cls(line[at + 1].start)
            return None

    return ShellAssignment


def warm_up() -> None:
    """Import IPython's transformers."""
    _ipython()


def clean(lines: list[str]) -> list[str]:
    """Lines without the indentation and the prompts (`>>>`, `In [1]:`) that IPython strips.

    As many lines as before: IPython also drops empty lines at the top, this does not.
    """
    transformers, _ = _ipython()
    top = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    rest = [f"{line}\n" for line in lines[top:]]
    for name in ("leading_indent", "classic_prompt", "ipython_prompt"):
        rest = getattr(transformers, name)(rest)
    # IPython splits at form feeds and other separators as well, which are not lines here.
    return lines[:top] + "".join(rest).split("\n")[:-1] if rest else lines


def first(lines: list[str]) -> Special | None:
    """The first use of special syntax in a cell, None if there is none.

    As in IPython: what stands in strings and comments does not count.
    """
    transformers, kinds = _ipython()
    ended = [f"{line}\n" for line in lines]
    try:
        tokens = transformers.make_tokens_by_line(ended)
    except (SyntaxError, ValueError, tokenize.TokenError):
        return None  # not Python, and not for this reason: compiling it will say why
    found = [one for kind in kinds if (one := kind.find(tokens))]
    for one in sorted(found, key=lambda one: one.sortby()):
        try:
            changed = one.transform(ended)
        except SyntaxError:
            continue
        count = len(ended) - len(changed) + 1
        return _special(lines, one.start_line, one.start_col, count, changed[one.start_line])
    return None


_STATEMENT = re.compile(r"(\s*)")
_ASSIGNED = re.compile(r"([^#\n]*?[^=!<>]=[ \t]*)[%!]")


def every(lines: list[str]) -> list[Special] | None:
    """All uses of special syntax, if they are lines of their own or assigned; else None.

    `first` reads the tokens of the whole cell for each. This puts Python in the place of what
    looks like special syntax, and has the parser say whether a statement is there: in strings
    and brackets there is none. None: it is not as simple as that, and `first` must look.
    """
    shown = list(lines)
    places: dict[tuple[int, int], type[ast.stmt]] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        alone = line.lstrip()[:1] in ("%", "!", "?")
        if found := (_STATEMENT if alone else _ASSIGNED).match(line):
            before, count = found[1], _continued(lines, index)
            shown[index : index + count] = [before + ("pass" if alone else "...")] + [""] * (
                count - 1
            )
            places[index + 1, len(before.encode())] = ast.Pass if alone else ast.Assign
            index += count - 1
        index += 1
    try:
        tree = ast.parse("\n".join(shown))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    if not places or not places.items() <= dict(_placed(tree)).items():
        return None
    specials = []
    for row, _ in sorted(places):
        special = first(lines[row - 1 :][: _continued(lines, row - 1)])
        if special is None or special.line != 0:
            return None
        specials.append(replace(special, line=row - 1))
    return specials


def _continued(lines: list[str], start: int) -> int:
    """How many lines from `start` on backslashes make one."""
    count = 1
    while lines[start + count - 1].endswith("\\") and start + count < len(lines):
        count += 1
    return count


def _placed(tree: ast.Module) -> Iterator[tuple[tuple[int, int], type[ast.stmt]]]:
    """Where there is a `pass`, or `...` that is assigned."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Pass):
            yield (node.lineno, node.col_offset), ast.Pass
        elif isinstance(node, ast.Assign):
            yield (node.value.lineno, node.value.col_offset), ast.Assign
        elif hasattr(node, "body") or hasattr(node, "cases"):
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                todo += getattr(node, part, ())


def _special(lines: list[str], line: int, column: int, count: int, changed: str) -> Special:
    python = changed[column:].rstrip("\n")
    kind: Kind = "call"
    name = argument = ""
    if python.startswith("get_ipython()."):
        call = ast.parse(python, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        values = [ast.literal_eval(value) for value in call.args]
        method = call.func.attr
        if method == "run_line_magic":
            name, argument = values
            kind = "help" if name in ("pinfo", "pinfo2", "psearch") else "magic"
        else:
            kind = METHODS.get(method, "call")
            argument = "".join(values)
    before = lines[line][:column]
    return Special(kind, line, count, before, name, argument.strip(), python)


def expanded(text: str) -> str:
    """A Python expression for text in which IPython would fill in `{expression}` and `$name`.

    A `$name` that is no variable and `${name}` are left for the shell. Text whose braces hold
    no Python expression is taken as it is, as IPython does: awk's `{print $1}`, find's `{}`.
    """
    from IPython.utils.text import DollarFormatter

    pieces: list[str] = []
    try:
        for literal, field, spec, conversion in DollarFormatter().parse(text):
            if field is None:
                pieces.append(repr(literal))
            elif literal.endswith("$"):
                mark = f"!{conversion}" if conversion else ""
                pieces.append(repr(f"{literal}{{{field}{mark}{':' if spec else ''}{spec}}}"))
            else:
                value = f"repr({_field(field, text)})" if conversion == "r" else _field(field, text)
                value = f"format({value}, {spec!r})" if spec else f"str({value})"
                pieces += [repr(literal), value] if literal else [value]
    except (ValueError, SyntaxError):
        return repr(text)
    return " + ".join(pieces) or "''"


def _field(field: str, text: str) -> str:
    ast.parse(field.strip(), mode="eval")
    if field.isidentifier() and f"${field}" in text:
        return f"globals().get({field!r}, {'$' + field!r})"
    return f"({field})"


def next_statement(lines: list[str], start: int) -> int:
    """Index of the first line from `start` on that is not blank and not a comment."""
    for index in range(start, len(lines)):
        if lines[index].strip() and not lines[index].lstrip().startswith("#"):
            return index
    return len(lines)
