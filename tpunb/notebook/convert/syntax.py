"""Find IPython's special syntax in cells, with IPython's own transformers.

The only module that uses IPython's input transformers. Their classes and methods are documented
for authors of transformers; undocumented, and checked by a test, are `start_line` and
`start_col` of their base class and `_find_assign_op` (IPython 7.34 to 9.18).

The equivalent Python, `get_ipython().run_line_magic(…)`, is found as well: it is common in
exported notebooks and in libraries' examples.
"""

from __future__ import annotations

import ast
import sys
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Kind = Literal["magic", "shell", "capture", "help", "call", "cell"]


METHODS: dict[str, Kind] = {"system": "shell", "getoutput": "capture", "show_usage": "help"}
"""Methods of `get_ipython()` to which special syntax is translated, besides `run_line_magic`."""


@dataclass(frozen=True)
class Special:
    """One use of special syntax in a cell."""

    kind: Kind
    """`%magic`, `!command`, a command whose output is captured, `help?`, or an automatic call
    (`,f a b`), which is plain Python after translation. A call of a cell magic is "cell"."""
    line: int
    """Index of its first line, from 0."""
    count: int
    """Number of lines (it may be continued with backslashes)."""
    before: str
    """Text before it on its first line: an indentation, or `x = `."""
    name: str
    """The name of a magic, without %."""
    argument: str
    """The text after the name of a magic; the command of a shell line."""
    python: str
    """IPython's translation to Python."""

    @property
    def assigns(self) -> bool:
        """True if its value is assigned: `x = %magic`."""
        return bool(self.before.strip())


@cache
def _ipython() -> tuple[Any, list[Any]]:
    """Return IPython's module of transformers, and those that find special syntax in tokens."""
    from IPython.core import inputtransformer2 as transformers

    kinds = list(transformers.TransformerManager().token_transformers)
    if sys.version_info >= (3, 12) and not hasattr(transformers.SystemAssign, "find_post_312"):
        kinds.append(_shell_assignment(transformers))
    return transformers, kinds


def _shell_assignment(transformers: Any) -> Any:
    """Return a transformer for `x = !command` in IPython 7 and early 8 on Python 3.12 and later.

    Colab has such a combination. There `!` is an operator token, no longer the error token that
    IPython searches for.
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


def parsed(lines: Sequence[str]) -> ast.Module | None:
    """Parse lines of code; None if they are not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warned about the cells when they ran
            return ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def warm_up() -> None:
    """Import IPython's transformers."""
    _ipython()


def clean(lines: list[str]) -> list[str]:
    """Remove the indentation and the prompts (`>>>`, `In [1]:`) that IPython strips.

    The number of lines stays the same; IPython also drops empty lines at the top.
    """
    transformers, _ = _ipython()
    top = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    rest = [f"{line}\n" for line in lines[top:]]
    for name in ("leading_indent", "classic_prompt", "ipython_prompt"):
        rest = getattr(transformers, name)(rest)
    # IPython also splits at form feeds and other separators, which do not end lines in Python.
    return lines[:top] + "".join(rest).split("\n")[:-1] if rest else lines


def first_special(lines: list[str]) -> Special | None:
    """Return the first use of special syntax in a cell; None if there is none.

    As in IPython, strings and comments do not count.
    """
    transformers, kinds = _ipython()
    ended = [f"{line}\n" for line in lines]
    try:
        tokens = transformers.make_tokens_by_line(ended)
    except (SyntaxError, ValueError, tokenize.TokenError):
        return None  # not Python for another reason, which compiling will report
    matches = [match for kind in kinds if (match := kind.find(tokens))]
    for match in sorted(matches, key=lambda match: match.sortby()):
        try:
            changed = match.transform(ended)
        except SyntaxError:
            continue
        line, count = match.start_line, len(ended) - len(changed) + 1
        return _special(lines, line, match.start_col, count, changed[line])
    return None


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


def interpolated(text: str, literal: Callable[[str], str] = repr, *, strict: bool = False) -> str:
    """Return a Python expression for text in which IPython fills in `{expression}` and `$name`.

    A `$name` that is not a variable, and `${name}`, are left for the shell. As in IPython, text
    whose braces contain no Python expression is unchanged: awk's `{print $1}`, find's `{}`.

    `literal` makes an expression of the text in between. With `strict` the expression raises for
    a name that is not a variable, in which case IPython leaves the whole text unchanged.
    """
    from IPython.utils.text import DollarFormatter

    pieces: list[str] = []
    try:
        for between, field, spec, conversion in DollarFormatter().parse(text):
            if field is None:
                pieces += [literal(between)] if between else []
            elif between.endswith("$") and not strict:
                mark = f"!{conversion}" if conversion else ""
                pieces.append(literal(f"{between}{{{field}{mark}{':' if spec else ''}{spec}}}"))
            else:
                # IPython has slices instead of format specifications: {x[1:3]}.
                value = _field(f"{field}:{spec}" if spec else field, text, strict)
                value = f"{_CONVERSIONS[conversion]}({value})"
                pieces += [literal(between), value] if between else [value]
    except (ValueError, SyntaxError, KeyError):
        return literal(text)
    return " + ".join(pieces) or "''"


_CONVERSIONS = {None: "str", "s": "str", "r": "repr", "a": "ascii"}


def _field(field: str, text: str, strict: bool) -> str:
    ast.parse(field.strip(), mode="eval")
    name, *attributes = field.split(".")
    if f"${field}" in text and name.isidentifier() and not strict:
        default = "" if attributes else f", {'$' + field!r}"
        value = f"globals().get({name!r}{default})"
        for attribute in attributes:
            value = f"getattr({value}, {attribute!r}, {'$' + field!r})"
        return value
    return field if field.isidentifier() else f"({field})"


def next_statement(lines: list[str], start: int) -> int:
    """Return the index of the first line from `start` on that is neither blank nor a comment."""
    for index in range(start, len(lines)):
        if lines[index].strip() and not lines[index].lstrip().startswith("#"):
            return index
    return len(lines)


ARGUMENTS = {"run_line_magic": 2, "run_cell_magic": 3, "magic": 1, "system": 1, "getoutput": 1}
"""Supported methods, and the number of arguments that each needs (IPython 7.34 to 9.18)."""


def special_calls(lines: list[str]) -> list[Special]:
    """Return calls of `get_ipython()` methods, as statements or assigned, with string arguments.

    Empty for a cell that is not Python.
    """
    if (tree := parsed(lines)) is None:
        return []
    shells = _names_of_shell(tree)
    return [special for node in ast.walk(tree) for special in _special_call(node, lines, shells)]


def shell_calls(lines: list[str]) -> list[ast.Attribute]:
    """Return the functions `get_ipython().system` and `getoutput` of all calls in a cell."""
    if (tree := parsed(lines)) is None:
        return []
    shells = _names_of_shell(tree)
    return [
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("system", "getoutput")
        and _is_shell(node.func.value, shells)
        and node.func.lineno == node.func.end_lineno
    ]


def _names_of_shell(tree: ast.Module) -> set[str]:
    """Return the names to which `get_ipython()` is assigned."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _gets_shell(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_shell(node: ast.expr, shells: set[str]) -> bool:
    return _gets_shell(node) or (isinstance(node, ast.Name) and node.id in shells)


def _gets_shell(node: ast.AST) -> bool:
    """True for `get_ipython()` or `IPython.get_ipython()`."""
    if not isinstance(node, ast.Call) or node.args or node.keywords:
        return False
    name = node.func
    return (isinstance(name, ast.Name) and name.id == "get_ipython") or (
        isinstance(name, ast.Attribute) and name.attr == "get_ipython"
    )


def _special_call(node: ast.AST, lines: list[str], shells: set[str]) -> Iterator[Special]:
    if not isinstance(node, ast.Expr | ast.Assign) or not isinstance(call := node.value, ast.Call):
        return
    method = call.func
    if not isinstance(method, ast.Attribute) or method.attr not in ARGUMENTS or call.keywords:
        return
    if not _is_shell(method.value, shells):
        return
    values = [part.value for part in call.args if isinstance(part, ast.Constant)]
    texts = [value for value in values if isinstance(value, str)]
    # `run_line_magic("matplotlib", "inline", 1)`: the stack depth does not matter.
    if len(texts) < ARGUMENTS[method.attr] or len(call.args) > 3:
        return
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: call.col_offset].decode()
    after = lines[last].encode()[call.end_col_offset :].decode().strip()
    if call.lineno != node.lineno or (after.rstrip(";") and not after.startswith("#")):
        return
    if isinstance(node, ast.Expr) and before.strip():
        return
    kind, name, argument = _meaning(method.attr, texts)
    yield Special(kind, first, last - first + 1, before, name, argument, ast.unparse(call))


def _meaning(method: str, texts: list[str]) -> tuple[Kind, str, str]:
    if method in METHODS:
        return METHODS[method], "", texts[0]
    if method == "run_cell_magic":
        return "cell", texts[0], "\n".join(texts[1:])
    text = " ".join(texts[:2]) if method == "run_line_magic" else texts[0]
    name, _, argument = text.lstrip("%").partition(" ")
    return "magic", name, argument.strip()
