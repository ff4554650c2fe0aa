"""Convert one cell to plain Python, line for line."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from tpunb.notebook.convert import magics, setup_lines, statements, syntax
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.setup_lines import SetupCode
from tpunb.notebook.convert.syntax import Special
from tpunb.notebook.models import LeftOut
from tpunb.notebook.scopes import scopes_of
from tpunb.utils.secrets import private_key, without_secrets

SKIP_LINE = "# tpu: skip"
SKIP_TAGS = {"tpu-skip": LeftOut.TAGGED_SKIP, "active-ipynb": LeftOut.TAGGED_IPYNB}
"""Tags of cells that run in the notebook only; the second is jupytext's."""

_PASS = "pass  # "


def skip_reason(source: str, tags: Iterable[str]) -> LeftOut | None:
    """Return how a cell is marked to run in the notebook only; None if it is not."""
    if marks := [reason for tag, reason in SKIP_TAGS.items() if tag in tags]:
        return marks[0]
    first = source.lstrip().partition("\n")[0].strip()
    return LeftOut.SKIP_COMMENT if first == SKIP_LINE else None


class LeftOutLine(NamedTuple):
    """One or more lines of a cell that do not run."""

    line: int
    """First line in the cell, from 1."""
    text: str
    reason: LeftOut


class LostName(NamedTuple):
    """A name that a line defines in the notebook, but not in a script."""

    line: int
    """Line in the cell, from 1."""
    name: str
    maker: str
    """The text of the line, or its beginning."""


class LeftOutStatement(NamedTuple):
    """A statement that does not run, and the names that are therefore missing."""

    node: ast.stmt
    reason: LeftOut
    names: tuple[str, ...] = ()


@dataclass
class EditedCell:
    """The lines of a cell during conversion: lines are replaced or commented out, never removed."""

    lines: list[str]
    left_out: list[LeftOutLine] = field(default_factory=list)
    lost: list[LostName] = field(default_factory=list)
    setup: bool = False
    """True to convert setup lines to Python (`setup_lines`), False to leave them out."""
    train: bool = False
    """True for a train cell, whose lines run in each rank."""
    secrets: dict[str, str] | None = None
    """Secrets by the environment variables that replace them; None if they stay."""
    converted: list[tuple[Special, list[str], LeftOut | str]] = field(default_factory=list)
    """Lines that have become Python in case they are in a function, with their text, and why they
    are left out elsewhere, or their code there."""
    timed: tuple[int, str] | None = None
    """Line (from 0) and setup code of `%%timeit`."""

    def drop(self, first: int, count: int, reason: LeftOut) -> None:
        """Turn lines (from 0) into comments, with `pass` before the first if it is indented."""
        taken = self.lines[first : first + count]
        text = without_secrets("\n".join(taken)).partition("\n")[0].strip()
        shown = text + (" …" if count > 1 else "")
        self.left_out.append(LeftOutLine(first + 1, shown, reason))
        indent = taken[0][: len(taken[0]) - len(taken[0].lstrip())]
        mark = _PASS if indent else "# "
        self.put(first, count, f"{indent}{mark}left out ({reason}): {text}")

    def leave_out(self, left_out: Iterable[LeftOutStatement]) -> None:
        """Leave out statements; a statement that shares a line with others becomes `pass`."""
        start = len(self.left_out)
        by_place = sorted(left_out, key=lambda entry: (entry.node.lineno, entry.node.col_offset))
        for node, reason, names in reversed(by_place):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            self.lose(first + 1, self.lines[first], names)
            if statements.stands_alone(self.lines, node):
                self.drop(first, last - first, reason)
            else:
                self.left_out.append(LeftOutLine(first + 1, ast.unparse(node), reason))
                statements.replace_by_pass(self.lines, node)
        self.left_out[start:] = self.left_out[start:][::-1]

    def fill(self, node: ast.stmt, code: str) -> None:
        """Replace a left-out statement by a simple statement."""
        first = node.lineno - 1
        line = self.lines[first]
        if line.startswith("# "):
            self.lines[first] = f"{code}  {line}"
        else:  # it became `pass` and shares its line with other statements
            before = line.encode()[: node.col_offset].decode()
            self.lines[first] = f"{before}{code}{line[len(before) + len('pass') :]}"

    def put(self, first: int, count: int, line: str) -> None:
        """Replace the first of some lines (from 0) by `line`; the others become comments."""
        hidden = without_secrets("\n".join(self.lines[first : first + count])).split("\n")
        # Notebook editors take "%%" or "!" at the start of a comment for a new cell or a
        # magic; the bar prevents that.
        shown = [f"# | {each}".rstrip() for each in hidden[1:]]
        self.lines[first : first + count] = [line, *shown]

    def only_in_functions(self, special: Special, outside: LeftOut | str) -> None:
        """Record lines that become other code, or are left out, outside functions."""
        text = self.lines[special.line : special.line + special.count]
        self.converted.append((special, text, outside))

    def lose(self, line: int, maker: str, names: Iterable[str]) -> None:
        """Record names that a line (from 1) no longer defines."""
        self.lost += [LostName(line, name, maker.strip()) for name in names]

    def set_up(self, first: int, count: int, before: str, code: SetupCode) -> None:
        """Replace lines (from 0) by the code of a setup line."""
        if len(code.lines) == count:
            self.lines[first : first + count] = [before + code.lines[0], *code.lines[1:]]
        else:
            self.put(first, count, before + code.lines[0])


_AUTOMAGIC_NODES = (
    *(ast.Module, ast.Expr, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Load),
)
"""Nodes of a line such as `ls -la` that is parsed as Python."""


@dataclass(frozen=True)
class PlainCell:
    """A cell in plain Python, with its number of lines unchanged, and what does not run."""

    lines: tuple[str, ...]
    left_out: tuple[LeftOutLine, ...] = ()
    lost: tuple[LostName, ...] = ()
    """Names that left-out lines define in the notebook."""
    compiles: bool = False
    """True if the text is known to compile."""


def plain_python(
    source: str, train: bool = False, secrets: dict[str, str] | None = None, setup: bool = False
) -> PlainCell:
    """Replace IPython's special syntax in a code cell.

    Cell magics that only measure or capture are unwrapped; magics and shell lines without use in
    a script are left out. Those of a train cell (`train`) and of functions become Python
    (`setup_lines`). Raises NotPythonError if none of this is possible.

    For an exported script, secrets in them become environment variables, which are added to
    `secrets`; with `setup`, all magics and shell lines become Python.
    """
    return _of_run(source, train) if secrets is None else _plain(source, train, secrets, setup)


@lru_cache(maxsize=4096)
def _of_run(source: str, train: bool) -> PlainCell:
    return _plain(source, train, None, setup=False)


def _plain(source: str, train: bool, secrets: dict[str, str] | None, setup: bool) -> PlainCell:
    lines = syntax.clean(source.split("\n"))
    cell = EditedCell(lines, setup=setup, train=train, secrets=secrets)
    mark_automagic(cell.lines)
    if not _unwrap(cell):
        return _plain_cell(cell, compiles=not setup)
    # Valid Python contains no special syntax; compiling is much cheaper than searching for it.
    while not (compiles := _compiles(cell.lines)) and syntax.parsed(cell.lines) is None:
        if (first := syntax.first_special(cell.lines)) is None:
            break
        _replace(cell, first)
    if "get_ipython" in source:
        for special in syntax.special_calls(cell.lines):
            compiles = False
            _replace(cell, special)
    _leave_out_of_prelude(cell)
    if "get_ipython" in source and _call_directly(cell):
        compiles = False
    if cell.timed is not None and _keep_names_local(cell, *cell.timed):
        compiles = False
    if _drop_needless_pass(cell):
        compiles = False
    return _plain_cell(cell, compiles)


def _plain_cell(cell: EditedCell, compiles: bool) -> PlainCell:
    left_out = tuple(sorted(cell.left_out))
    return PlainCell(tuple(cell.lines), left_out, tuple(cell.lost), compiles)


def parse_body(source: str) -> tuple[ast.Module, tuple[LostName, ...]]:
    """Parse a cell without tpunb's own magics; also return names that left-out lines define.

    Both are empty for a cell that is not Python.
    """
    lines = source.replace("\r\n", "\n").split("\n")
    try:
        cell = plain_python("\n".join("" if x.startswith("%%tpu_") else x for x in lines))
        return ast.parse("\n".join(cell.lines)), cell.lost
    except (NotPythonError, SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module([], []), ()


def mark_automagic(lines: list[str]) -> None:
    """Add the % to `pip install x` or `ls -la`, as IPython does in cells of one line.

    A line that may have an effect as Python stays unchanged.
    """
    at = syntax.next_statement(lines, 0)
    if at == len(lines) or syntax.next_statement(lines, at + 1) < len(lines):
        return
    name = lines[at].split(maxsplit=1)[0]
    # `run` alone most likely displays a variable, such as the result of a run.
    if name not in magics.AUTOMAGIC or lines[at].strip() == "run":
        return
    tree = syntax.parsed([lines[at]])
    nodes = [] if tree is None else ast.walk(tree)
    if all(isinstance(node, _AUTOMAGIC_NODES) for node in nodes):
        lines[at] = f"%{lines[at]}"


def _unwrap(cell: EditedCell) -> bool:
    """Remove the cell magics at the top of a cell; False if the whole cell was left out."""
    top = 0
    while (top := syntax.next_statement(cell.lines, top)) < len(cell.lines):
        line = cell.lines[top]
        name, _, argument = line[2:].strip().partition(" ")
        # `%%time?` is a request for help and is handled later.
        if not line.startswith("%%") or name.endswith("?"):
            break
        kept = name in magics.UNWRAPPED
        body = [] if kept else cell.lines[top + 1 :]
        key = None if cell.secrets is None else private_key("\n".join(body))
        if key is not None:
            raise NotPythonError("an exported script must contain no private key", top + key + 2)
        runs = not kept and (cell.setup or cell.train)
        if runs and (made := _cell_magic_code(cell, top, name, argument.strip(), body)):
            cell.set_up(top, len(cell.lines) - top, "", made)
            return False
        cell.lose(top + 1, line, magics.bound_by_magic(name, argument, body))
        if not kept:
            cell.drop(top, len(cell.lines) - top, _why(cell, name, magics.CELL_MAGICS))
            return False
        options = magics.UNWRAPPED[name]
        code = "" if options is None else magics.timed_code(argument, options)
        shown = f"# magic: {without_secrets(line)}"
        if name == "timeit":
            cell.timed = top, code
        cell.lines[top] = f"{code}  {shown}" if code else shown
        top += 1
        cell.lines[top:] = syntax.clean(cell.lines[top:])
    return True


def _compiles(lines: list[str]) -> bool:
    try:
        compile("\n".join(lines), "<cell>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return False
    return True


def _replace(cell: EditedCell, special: Special) -> None:
    """Replace one use of special syntax by plain Python that takes the same lines."""
    if special.kind in ("magic", "shell", "capture"):
        _refuse_install(cell, special.line, f"{special.name} {special.argument}".strip())
    if special.kind == "cell":
        _replace_cell_magic(cell, special)
    elif special.kind == "help":
        cell.drop(special.line, special.count, LeftOut.HELP)
    elif special.kind == "call":
        _put(cell, special, special.python)
    elif special.assigns and _is_output(special):
        output = setup_lines.output_code(special.argument, cell.secrets)
        cell.set_up(special.line, special.count, special.before, output)
    elif special.assigns:
        _put(cell, special, _value(special))
    elif made := setup_lines.line_code(special, cell.secrets):
        if not cell.setup and not cell.train and special.name not in magics.CHANGE_FOLDER:
            reason = LeftOut.SHELL if special.kind != "magic" else _why(cell, special.name)
            cell.only_in_functions(special, reason)
        cell.set_up(special.line, special.count, special.before, made)
    elif value := magics.value_expression(special.name, *_value_of(special)):
        if not cell.train:
            cell.only_in_functions(special, _why(cell, special.name))
        _put(cell, special, f"print({value})")
    elif special.name in magics.TIMED:
        code = magics.timed_code(special.argument, magics.TIMED[special.name])
        if code:
            if not cell.train:
                cell.only_in_functions(special, _timed(code, special.name))
            _put(cell, special, _timed(code, special.name, f"{magics.TIME}({special.name!r})"))
        else:
            cell.drop(special.line, special.count, LeftOut.NOTEBOOK_ONLY)
    elif special.name in magics.REFUSED:
        raise NotPythonError(magics.REFUSED[special.name], special.line + 1)
    elif special.name == "run":
        _put(cell, special, magics.run_expression(special.argument, special.line + 1))
    elif special.name == "aimport" and (code := magics.aimport_statement(special.argument)):
        _put(cell, special, code)
    else:
        names = magics.bound_by_magic(special.name, special.argument, [])
        cell.lose(special.line + 1, f"%{special.name} {special.argument}", names)
        reason = _why(cell, special.name)
        harmless = reason in (LeftOut.NOTEBOOK_ONLY, LeftOut.TPUNB_MAGIC)
        if cell.train and not (harmless and special.name not in magics.WITH_EFFECT):
            raise _without_ipython(f"%{special.name}", special.line)
        cell.drop(special.line, special.count, reason)


def _why(cell: EditedCell, name: str, known: dict[str, LeftOut] = magics.LINE_MAGICS) -> LeftOut:
    """Return why a magic is left out; if setup lines are converted, never because it ran before."""
    reason = magics.why_left_out(name, known)
    done = (LeftOut.SHELL, LeftOut.INSTALL, LeftOut.KERNEL_STATE)
    return LeftOut.NOTEBOOK_ONLY if cell.setup and reason in done else reason


def _is_output(special: Special) -> bool:
    """True for `x = !command`, or an equivalent magic."""
    return special.kind == "capture" or special.name in ("sx", "system")


def _replace_cell_magic(cell: EditedCell, special: Special) -> None:
    """Replace a call of a cell magic, whose body is a string, as the magic itself would be."""
    if special.name in magics.UNWRAPPED or special.assigns:
        raise NotPythonError(
            f"the code of `%%{special.name}` is a string here, which tpunb cannot read: "
            f"write it as a cell that begins with %%{special.name}",
            special.line + 1,
        )
    argument, _, body = special.argument.partition("\n")
    if code := _cell_magic_code(cell, special.line, special.name, argument, body.split("\n")):
        if not cell.setup and not cell.train:
            cell.only_in_functions(special, _why(cell, special.name, magics.CELL_MAGICS))
        # The body is one string in one statement, so the code must fit on one line.
        code.lines = [ast.unparse(ast.parse("\n".join(code.lines)))]
        cell.set_up(special.line, special.count, special.before, code)
        return
    names = magics.bound_by_magic(special.name, argument, body.split("\n"))
    cell.lose(special.line + 1, f"%%{special.name} {argument}", names)
    cell.drop(special.line, special.count, _why(cell, special.name, magics.CELL_MAGICS))


def _cell_magic_code(
    cell: EditedCell, line: int, name: str, argument: str, body: list[str]
) -> SetupCode | None:
    """Return the Python of a cell magic (at a line from 0) that starts a program or writes a file.

    In a train cell it must be one.
    """
    code = setup_lines.cell_code(name, argument, body, cell.secrets)
    if cell.train and code is None:
        raise _without_ipython(f"%%{name}", line)
    if name in magics.SUBPROCESSES:
        for index, text in enumerate(body, line + 1):
            _refuse_install(cell, min(index, len(cell.lines) - 1), text)
    return code


def _refuse_install(cell: EditedCell, line: int, command: str) -> None:
    """Refuse a command (at a line from 0) of a train cell that installs packages."""
    if cell.train and setup_lines.installs(command):
        raise NotPythonError(
            f"in a train cell, `{command}` would change the packages in each rank, while the "
            "others use them",
            line + 1,
            "Put it into a cell of its own above the train cell, and run that once.",
        )


def _without_ipython(magic: str, line: int) -> NotPythonError:
    reason = f"`{magic}` does not work in a train cell: ranks have no IPython"
    return NotPythonError(reason, line + 1, magics.ABOVE)


def _leave_out_of_prelude(cell: EditedCell) -> None:
    """Leave out lines outside functions: they have run in the notebook."""
    inside = _lines_of_functions(cell.lines) if cell.converted else set()
    for special, text, outside in cell.converted:
        if special.line + 1 not in inside:
            cell.lines[special.line : special.line + special.count] = text
            if isinstance(outside, LeftOut):
                cell.drop(special.line, special.count, outside)
            else:
                _put(cell, special, outside)


def _lines_of_functions(lines: list[str]) -> set[int]:
    """Return the lines (from 1) of the bodies of functions."""
    tree = syntax.parsed(lines)
    return {
        line
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


def _call_directly(cell: EditedCell) -> bool:
    """Replace `get_ipython().system(command)` and `getoutput` where the command is no literal."""
    every = cell.setup or cell.train
    inside = None if every else _lines_of_functions(cell.lines)
    calls = [
        node for node in syntax.shell_calls(cell.lines) if inside is None or node.lineno in inside
    ]
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        row = cell.lines[node.lineno - 1].encode()  # columns count bytes of UTF-8
        name = b"_tpunb_setup_shell" if node.attr == "system" else b"_tpunb_setup_output"
        row = row[: node.col_offset] + name + row[node.end_col_offset :]
        cell.lines[node.lineno - 1] = row.decode()
    return bool(calls)


def _drop_needless_pass(cell: EditedCell) -> bool:
    """Drop `pass` from left-out lines, except where a block would be empty: linters mind it.

    Returns True if there were such lines.
    """
    found = [
        line - 1 for line, _, _ in cell.left_out if cell.lines[line - 1].lstrip().startswith(_PASS)
    ]
    for index in found:
        before = cell.lines[index]
        cell.lines[index] = before.replace(_PASS, "# ", 1)
        if syntax.parsed(cell.lines) is None:
            cell.lines[index] = before
    return bool(found)


def _timed(code: str, magic: str, *contexts: str) -> str:
    """Return code of `%timeit`, with the names that it binds kept local, or of a similar magic.

    It is inside these context managers, unless it is a compound statement.
    """
    names = _local_names(code) if magic == "timeit" else []
    if names:
        simple = _with(code, *contexts, magics.timeit_call(names))
        whole = _with("pass", *contexts, magics.timeit_call(names, code))
    else:
        simple, whole = _with(code, *contexts), code
    return simple if syntax.parsed([simple]) else whole


def _with(code: str, *contexts: str) -> str:
    return f"with {', '.join(contexts)}: {code}" if contexts else code


def _keep_names_local(cell: EditedCell, top: int, setup: str) -> bool:
    """Put the lines below `%%timeit` into a block that keeps their names local.

    False if nothing changes: they bind no names, or are not Python, which is reported later.
    """
    head, body = cell.lines[top], cell.lines[top + 1 :]
    setup = setup if head.startswith(f"{setup}  #") else ""
    made, names = _local_names(setup), _local_names("\n".join(body))
    tree = syntax.parsed(body)
    if not (made or names) or tree is None:
        return False
    inside = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }  # lines that begin in a string
    bound = f" as [{', '.join(made)}]" if made else ""
    code = f"with {magics.timeit_call(names, setup, made)}{bound}:{'' if tree.body else ' pass'}"
    cell.lines[top] = f"{code}  {head.removeprefix(setup).lstrip()}"
    cell.lines[top + 1 :] = [
        f"    {line}" if line.strip() and number not in inside else line
        for number, line in enumerate(body, 1)
    ]
    return True


def _local_names(code: str) -> list[str]:
    """Return the names that code binds at its top level, without those declared `global`."""
    if (tree := syntax.parsed([code])) is None:
        return []
    bound = scopes_of(tree).globals.bindings
    declared = {n for node in ast.walk(tree) if isinstance(node, ast.Global) for n in node.names}
    return sorted(
        name
        for name in bound.keys() - declared
        if any(one.frame.function is None and not one.changes for one in bound[name])
    )


def _put(cell: EditedCell, special: Special, code: str) -> None:
    cell.put(special.line, special.count, special.before + code)


def _value(special: Special) -> str:
    if special.name == "time":
        return magics.timed_code(special.argument, "")
    value = magics.value_expression(special.name, *_value_of(special))
    if value is None:
        raise NotPythonError(
            f"`%{special.name}` has no value in a script: write it in Python",
            special.line + 1,
        )
    return value


def _value_of(special: Special) -> tuple[str, str]:
    """Return the argument of a magic, and the expression for it with variables filled in."""
    return special.argument, syntax.interpolated(special.argument)
