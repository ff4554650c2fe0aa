"""Values that a train cell returns to the notebook, in the scripts of later train cells.

In a run they are read from the run folder of the earlier run. A script that runs on its own has no
run folder: there the earlier train cell runs in place, on every rank, and then all ranks get the
values that rank 0 would have returned to the notebook.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tpunb.notebook.convert.cells import EditedCell
from tpunb.notebook.convert.statements import (
    executed,
    stands_alone,
)
from tpunb.notebook.models import EarlierValues, LeftOut
from tpunb.notebook.scopes import FunctionOrClass, Scopes, bound_names, dotted, first_name
from tpunb.utils.options import join_lists

_ATTACH = re.compile(r"^(?P<indent>\s*)(?:(?P<name>\w+)\s*=\s*)?%tpu_attach\b")
"""A line with `%tpu_attach`, and the name to which its value is assigned."""
_TRAIN = "%%tpu_train"
ENDED = "_tpunb_ended"
"""Name of the module `tpunb.runs.ended` in the script of a run."""
IMPORT = f"from tpunb.runs import ended as {ENDED}"
BEGIN = "_tpunb_begin_cell"
"""Name of the helper that begins a train cell in a script that runs on its own."""
_VARIABLES = re.compile(r"[^\W\d]\w*(,[^\W\d]\w*)*")


class TrainLine(NamedTuple):
    """The names in `--returns` and `--out` of a train cell's option line."""

    returns: tuple[str, ...] = ()
    out: str | None = None
    unclear: bool = False
    """True if names come from variables, as in `--returns {names}`."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that the train cell binds in the notebook."""
        return (*self.returns, *([self.out] if self.out else []))


def train_line(source: str) -> TrainLine:
    """Parse the option line in the source of a train cell, as far as possible without a kernel."""
    line = next((line for line in source.split("\n") if line.startswith(_TRAIN)), "")
    return _option_line(line.removeprefix(_TRAIN))


def _option_line(line: str) -> TrainLine:
    try:
        words = join_lists(shlex.split(line), ("--returns",))
    except ValueError:  # an unclosed quote
        return TrainLine()
    values: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in ("--returns", "--out"):
            values[name] = (value if equals else following).replace(" ", "")
    unclear = any(not _VARIABLES.fullmatch(value.strip(",")) for value in values.values())
    if unclear:
        return TrainLine(unclear=True)
    returns = tuple(name for name in values.get("--returns", "").split(",") if name)
    return TrainLine(returns, values.get("--out"))


def read_back(values: EarlierValues) -> list[str]:
    """Return the lines that bind the kernel's values in the script of a run."""
    lines = [IMPORT]
    for run in values.runs:
        given, value = ", ".join(map(repr, (run.folder, *run.names))), "_tpunb_run"
        if run.handle:
            raises = "" if run.raises else ", raises=False"
            lines.append(f"{run.out} = {ENDED}.EndedRun({given}{raises})")
            value = f"{run.out}.result"
        else:
            lines.append(f"_tpunb_run = {ENDED}.read_run({given})")
        lines += [f"{name} = {value}.returns[{name!r}]" for name in run.names if name != run.out]
        if run.out is not None and not run.handle:
            lines.append(f"{run.out} = _tpunb_run")
    return lines


def runs_read(script: str) -> list[str]:
    """Return the folders of the runs from which a script reads values."""
    found = re.findall(rf"\b{ENDED}\.(?:read_run|EndedRun)\(('(?:[^'\\]|\\.)*')", script)
    return list(dict.fromkeys(ast.literal_eval(text) for text in found))


def assign(values: Mapping[str, str]) -> str:
    """Return a line that binds names to expressions that use `ENDED`."""
    return "; ".join([IMPORT, *(f"{name} = {value}" for name, value in values.items())])


def put_for_attach(source: str, values: EarlierValues | None) -> str:
    """Replace the `%tpu_attach` lines of a cell by the values that they brought.

    `values` is None in a script that runs on its own, where the run has been executed above.
    """
    lines = source.split("\n")
    for index, line in enumerate(lines):
        if match := _ATTACH.match(line):
            code = [] if values is None else read_back(values)
            out = None if values is not None else _option_line(line[match.end() :]).out
            code += [f"{name} = _tpunb_run" for name in (match["name"], out) if name]
            if code:
                lines[index] = match["indent"] + "; ".join(code)
    return "\n".join(lines)


def in_place(lines: Iterable[str], options: TrainLine, *, tpunb: bool) -> list[str]:
    """Return the body of a train cell, with the lines that a script needs around it.

    `tpunb`: the script imports tpunb, which it needs in order to hand values on.
    """
    body = list(lines)
    head = next((at for at, line in enumerate(body) if is_train_cell(line)), None)
    if head is None:
        return body  # another magic has replaced the whole cell
    if not tpunb:
        return [*body, "_tpunb_end_group()"]
    body[head] = f"_tpunb_before = {BEGIN}()  {body[head]}"
    values = ", ".join(f"{name!r}: {name}" for name in options.returns)
    body.append(f"_tpunb_run = _tpunb_end_cell(_tpunb_before, lambda: {{{values}}})")
    body += [f"{name} = _tpunb_run.returns[{name!r}]" for name in options.returns]
    return [*body, *([f"{options.out} = _tpunb_run"] if options.out else [])]


KNOWN = (
    *("state", "world_size", "returns", "value", "failure", "failures", "result", "wait", "stop"),
)
"""Attributes of an earlier run that a script on its own has; the rest is in the run folder."""
_SHOW = ("print", "display", "plt", "sns", "tpunb")
"""First names of calls that only display."""


def is_train_cell(source: str) -> bool:
    """True if this plain Python was made from a train cell."""
    return f"# magic: {_TRAIN}" in source


def leave_out_run_folder_reads(
    cell: EditedCell, tree: ast.Module, scopes: Scopes, runs: set[str], lost: set[str]
) -> None:
    """Leave out statements that only display, or assign, contents of a run folder.

    `runs` are names of results. Names that are no longer assigned are added to `lost`, and
    statements that only display them are left out as well. Raises RunFolderError if a statement
    may do more.
    """
    for node in tree.body:
        if isinstance(node, FunctionOrClass):
            continue
        parts = list(executed(node))
        used = next(filter(None, (_in_folder(part, scopes, runs) for part in parts)), None)
        if used is None and not any(isinstance(p, ast.Name) and p.id in lost for p in parts):
            continue
        shows = isinstance(node, ast.Expr) and first_name(node.value, calls=True) in {
            *_SHOW,
            *runs,
            *lost,
        }
        named = isinstance(node, ast.Assign) and all(isinstance(x, ast.Name) for x in node.targets)
        if (shows or named) and stands_alone(cell.lines, node):
            names = bound_names(ast.Module([node], []))
            lost |= names
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            cell.lose(first + 1, cell.lines[first], names)
            cell.drop(first, last - first, LeftOut.RUN_FOLDER)
        elif used is not None:
            raise RunFolderError(used, node.lineno)


class RunFolderError(Exception):
    """A statement needs a run folder, and does more than display its contents."""

    def __init__(self, used: str, line: int) -> None:
        super().__init__(
            f"`{used}` is in a run's folder, which a script that runs by itself does not have. "
            "Return what is needed with --returns, or tag the cell tpu-skip"
        )
        self.line = line


def _in_folder(node: ast.AST, scopes: Scopes, runs: set[str]) -> str | None:
    """Return the name of an attribute that is read from a run folder; None for other nodes."""
    if not isinstance(node, ast.Attribute) or node.attr in (*KNOWN, "raise_for_failure"):
        return None
    value = node.value
    if isinstance(value, ast.Attribute) and value.attr == "result":
        value = value.value
    whose = dotted(value)
    if whose not in runs:
        whose = scopes.written(value)
    return f"{whose}.{node.attr}" if whose in {"tpunb.last_run", *runs} else None


CALL_HELPER = "_tpunb_launch"
"""Name of the replacement of `tpunb.launch` in a script that runs on its own."""
