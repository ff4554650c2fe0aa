"""One cell as plain Python, line for line."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache

from tpunb.script import bindings, calls, leaving, running, syntax, treatments
from tpunb.script.leaving import Lost, NotPythonError
from tpunb.script.syntax import Special

__all__ = ["Lost", "NotPythonError", "Plain", "magics", "plain"]

OTHERWISE = treatments.OTHERWISE
SKIP_LINE = "# tpu: skip"
SKIP_TAGS = frozenset({"tpu-skip", "active-ipynb"})
"""Tags of cells that are for the notebook alone; the second is jupytext's."""

AUTOMAGIC = (
    ast.Module,
    ast.Expr,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Name,
    ast.Load,
)
"""What `ls -la` is made of where it is read as Python."""


@dataclass(frozen=True)
class Plain:
    """A cell in plain Python: as many lines as it had, and what does not run."""

    lines: tuple[str, ...]
    left_out: tuple[tuple[int, str, str], ...] = ()
    """Line (from 1), text, reason."""
    lost: tuple[Lost, ...] = ()
    """Names that what does not run has made in the notebook."""
    compiles: bool = False
    """True if Python is known to compile it as it stands."""


@lru_cache(maxsize=4096)
def plain(source: str) -> Plain:
    """A code cell without IPython's special syntax; the last few thousand are remembered.

    Cell magics that only measure or capture are unwrapped, magics and shell lines that are
    of no use in a script are left out. Raises NotPythonError where neither is possible.
    """
    lines = syntax.clean(source.split("\n"))
    cell = leaving.Cell(lines)
    _mark_automagic(cell.lines)
    if not _unwrap(cell):
        return _made(cell, compiles=True)
    # Valid Python holds no special syntax; to know that is much cheaper than to look for it.
    compiles = _compiles(cell.lines)
    if not compiles and (specials := syntax.every(cell.lines)):
        for special in specials:
            _replace(cell, special)
        compiles = _compiles(cell.lines)
    while not compiles and not _is_python(cell.lines):
        if (found := syntax.first(cell.lines)) is None:
            break
        _replace(cell, found)
    if "get_ipython" in source:
        for special in calls.find(cell.lines):
            compiles = False
            _replace(cell, special)
    if _drop_needless_pass(cell):
        compiles = False
    return _made(cell, compiles)


def _made(cell: leaving.Cell, compiles: bool) -> Plain:
    left_out = tuple(sorted(cell.left_out))
    return Plain(tuple(cell.lines), left_out, tuple(cell.lost), compiles)


def _mark_automagic(lines: list[str]) -> None:
    """Write the % before `pip install x` or `ls -la`, which IPython adds to cells of one line.

    A line that may do something as Python stays as it is.
    """
    at = syntax.next_statement(lines, 0)
    if at == len(lines) or syntax.next_statement(lines, at + 1) < len(lines):
        return
    name = lines[at].split(maxsplit=1)[0]
    # `run` alone shows a variable, of which a run's result is the first that comes to mind.
    if name not in treatments.AUTOMAGIC or lines[at].strip() == "run":
        return
    try:
        nodes = list(ast.walk(ast.parse(lines[at])))
    except (SyntaxError, ValueError):
        nodes = []
    if all(isinstance(node, AUTOMAGIC) for node in nodes):
        lines[at] = f"%{lines[at]}"


def _unwrap(cell: leaving.Cell) -> bool:
    """Take off the cell magics at the head of a cell; False if all of it was left out."""
    top = 0
    while (top := syntax.next_statement(cell.lines, top)) < len(cell.lines):
        line = cell.lines[top]
        name, _, argument = line[2:].strip().partition(" ")
        # `%%time?` asks for help and is found as such later.
        if not line.startswith("%%") or name.endswith("?"):
            break
        kept = name in treatments.UNWRAPPED
        body = [] if kept else cell.lines[top + 1 :]
        cell.lose(top + 1, line, bindings.bound(name, argument, body))
        if not kept:
            cell.drop(top, len(cell.lines) - top, treatments.reason(name, treatments.CELLS))
            return False
        options = treatments.UNWRAPPED[name]
        code = "" if options is None else treatments.statement(argument, options)
        cell.lines[top] = f"{code}  # magic: {line}" if code else f"# magic: {line}"
        top += 1
        cell.lines[top:] = syntax.clean(cell.lines[top:])
    return True


def magics(source: str) -> list[str]:
    """The names of the cell magics at the head of a cell, the outermost first."""
    lines = source.split("\n")
    names = []
    at = -1
    while (at := syntax.next_statement(lines, at + 1)) < len(lines) and lines[at][:2] == "%%":
        names.append(lines[at][2:].strip().partition(" ")[0])
    return names


def _compiles(lines: list[str]) -> bool:
    try:
        compile("\n".join(lines), "<cell>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return False
    return True


def _is_python(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _replace(cell: leaving.Cell, special: Special) -> None:
    """Replace one use of special syntax by plain Python that takes the same lines."""
    if special.kind == "cell":
        _replace_cell_magic(cell, special)
    elif special.kind == "help":
        cell.drop(special.line, special.count, treatments.HELP)
    elif special.kind == "call":
        _put(cell, special, special.python)
    elif special.assigns:
        _put(cell, special, _value(special))
    elif special.kind != "magic":
        cell.drop(special.line, special.count, treatments.SHELL)
    elif special.name in treatments.STATEMENTS:
        code = treatments.statement(special.argument, treatments.STATEMENTS[special.name])
        if code:
            _put(cell, special, code)
        else:
            cell.drop(special.line, special.count, treatments.SHOWN)
    elif special.name in treatments.REFUSED:
        raise NotPythonError(
            f"{treatments.REFUSED[special.name]}. {treatments.OTHERWISE}", special.line + 1
        )
    elif special.name == "run":
        _put(cell, special, running.call(special.argument, special.line + 1))
    elif special.name == "aimport" and (code := treatments.imported(special.argument)):
        _put(cell, special, code)
    else:
        names = bindings.bound(special.name, special.argument, [])
        cell.lose(special.line + 1, f"%{special.name} {special.argument}", names)
        cell.drop(special.line, special.count, treatments.reason(special.name, treatments.LINES))


def _replace_cell_magic(cell: leaving.Cell, special: Special) -> None:
    """A cell magic whose body is a text: leave it out where that is what becomes of the magic."""
    if special.name in treatments.UNWRAPPED or special.assigns:
        raise NotPythonError(
            f"the code of `%%{special.name}` is a text here, so that nothing can look into it: "
            f"write it as a cell that begins with %%{special.name}. {treatments.OTHERWISE}",
            special.line + 1,
        )
    argument, _, body = special.argument.partition("\n")
    names = bindings.bound(special.name, argument, body.split("\n"))
    cell.lose(special.line + 1, f"%%{special.name} {argument}", names)
    cell.drop(special.line, special.count, treatments.reason(special.name, treatments.CELLS))


def _drop_needless_pass(cell: leaving.Cell) -> bool:
    """Make comments of lines that were left out, except where a block would be empty.

    Whether there were such lines.
    """
    kept = [line - 1 for line, _, _ in cell.left_out if leaving.is_pass(cell.lines[line - 1])]
    before = list(cell.lines)
    for index in kept:
        cell.lines[index] = leaving.without_pass(before[index])
    if not kept or _is_python(cell.lines):
        return bool(kept)
    cell.lines = list(before)
    for index in kept:
        cell.lines[index] = leaving.without_pass(before[index])
        if not _is_python(cell.lines):
            cell.lines[index] = before[index]
    return True


def _put(cell: leaving.Cell, special: Special, code: str) -> None:
    cell.put(special.line, special.count, special.before + code)


def _value(special: Special) -> str:
    expand = syntax.expanded(special.argument)
    if special.kind == "capture":
        return treatments.output(expand)
    if special.name == "time":
        return treatments.statement(special.argument, "")
    found = treatments.value(special.name, special.argument, expand)
    if found is None:
        raise NotPythonError(
            f"the value of `%{special.name}` cannot be had in a script: write it in Python. "
            f"{treatments.OTHERWISE}",
            special.line + 1,
        )
    return found
