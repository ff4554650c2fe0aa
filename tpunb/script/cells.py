"""One cell as plain Python, line for line."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from tpunb.script import syntax, treatments
from tpunb.script.syntax import Special

PASS = "pass  # "
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


class NotPythonError(Exception):
    """A line that has no plain Python form. `line` is its line in the cell, from 1."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason, line)
        self.reason = reason
        self.line = line


@dataclass
class Plain:
    """A cell in plain Python: as many lines as it had, and what does not run."""

    lines: list[str]
    left_out: list[tuple[int, str, str]] = field(default_factory=list)
    """Line (from 1), text, reason."""

    def drop(self, first: int, count: int, reason: str) -> None:
        """Turn lines (from 0) into comments, with `pass` before the first if it is indented."""
        taken = self.lines[first : first + count]
        text = taken[0].strip()
        self.left_out.append((first + 1, text + (" …" if count > 1 else ""), reason))
        indent = taken[0][: len(taken[0]) - len(taken[0].lstrip())]
        mark = PASS if indent else "# "
        self.lines[first] = f"{indent}{mark}left out ({reason}): {text}"
        for index in range(first + 1, first + count):
            self.lines[index] = _comment(self.lines[index])


def plain(source: str) -> Plain:
    """A code cell without IPython's special syntax.

    Cell magics that only measure or capture are unwrapped, magics and shell lines that are
    of no use in a script are left out. Raises NotPythonError where neither is possible.
    """
    cell = Plain(syntax.clean(source.split("\n")))
    _mark_automagic(cell)
    if not _unwrap(cell):
        return cell
    # Valid Python holds no special syntax; to know that is much cheaper than to look for it.
    while not _is_python(cell.lines) and (special := syntax.first(cell.lines)) is not None:
        _replace(cell, special)
    _drop_needless_pass(cell)
    return cell


def _mark_automagic(cell: Plain) -> None:
    """Write the % before `pip install x` or `ls -la`, which IPython adds to cells of one line.

    A line that may do something as Python stays as it is.
    """
    at = syntax.next_statement(cell.lines, 0)
    if at == len(cell.lines) or syntax.next_statement(cell.lines, at + 1) < len(cell.lines):
        return
    name = cell.lines[at].split(maxsplit=1)[0]
    if name not in (treatments.LINES | treatments.REFUSED | treatments.STATEMENTS):
        return
    try:
        nodes = list(ast.walk(ast.parse(cell.lines[at])))
    except (SyntaxError, ValueError):
        nodes = []
    if all(isinstance(node, AUTOMAGIC) for node in nodes):
        cell.lines[at] = f"%{cell.lines[at]}"


def _unwrap(cell: Plain) -> bool:
    """Take off the cell magics at the head of a cell; False if all of it was left out."""
    top = 0
    while (top := syntax.next_statement(cell.lines, top)) < len(cell.lines):
        line = cell.lines[top]
        name, _, argument = line[2:].strip().partition(" ")
        # `%%time?` asks for help and is found as such later.
        if not line.startswith("%%") or name.endswith("?"):
            break
        if name not in treatments.UNWRAPPED:
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


def _is_python(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _replace(cell: Plain, special: Special) -> None:
    """Replace one use of special syntax by plain Python that takes the same lines."""
    if special.kind == "help":
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
    else:
        cell.drop(special.line, special.count, treatments.reason(special.name, treatments.LINES))


def _drop_needless_pass(cell: Plain) -> None:
    """Make comments of lines that were left out, except where a block would be empty."""
    for line, _, _ in cell.left_out:
        kept = cell.lines[line - 1]
        if kept.lstrip().startswith(PASS):
            cell.lines[line - 1] = kept.replace(PASS, "# ", 1)
            if not _is_python(cell.lines):
                cell.lines[line - 1] = kept


def _put(cell: Plain, special: Special, code: str) -> None:
    first, last = special.line, special.line + special.count
    cell.lines[first:last] = [
        special.before + code,
        *(_comment(line) for line in cell.lines[first + 1 : last]),
    ]


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


def _comment(line: str) -> str:
    # The bar keeps "%%" and "!" away from the start of the comment, where notebook editors
    # would take them for a new cell or for a magic.
    return f"# | {line}".rstrip()
