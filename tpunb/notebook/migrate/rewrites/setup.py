"""Removes the obsolete set-up of a TPU: shell lines, variables, and set-up cells of 2020."""

from __future__ import annotations

import re

import libcst as cst
from libcst.metadata import GlobalScope

from tpunb.notebook import removed_apis, torch_installs
from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.migrate.imports import NotebookImports
from tpunb.notebook.migrate.names import NotebookNames, dotted, nodes_of
from tpunb.notebook.migrate.statements import Removals

SIGNS = ("tpu-pytorch/wheels", "update_server_xrt", "_VersionConfig", ":8475/requestversion")
"""Text that only occurs in cells which install the XRT runtime by hand, as in 2019 and 2020."""
SETUP = (
    "XRT and its set-up no longer exist. Colab and Kaggle have torch and torch_xla installed; "
    f"elsewhere: {removed_apis.INSTALL_PAIR}."
)
UNINSTALL = "The installed torch matches the installed torch_xla."
LIBRARIES = "The XRT runtime, whose libraries were in this folder, no longer exists."
EXPORTS = re.compile(r"^\s*(?:export|%env|%set_env)\s+(\w+)[=\s]")
_SET_FOR_COMMAND = re.compile(
    r"(?:^|[;&|(])\s*(?:env\s+)?((?:\w+=(?:\"[^\"]*\"|'[^']*'|[^\s;&|\"'])*\s+)+)(?=[^\s;&|])"
)
"""The variables in front of a command: `A=1 B=2 python train.py`."""
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_ENDS = re.compile(r";|&&|\|\|")
"""The end of a command in a shell line."""
_NO_ENDS = str.maketrans(";&|", "   ")
_COMMAND = re.compile(r"(?!(?:cd|echo|fi|done|true)\b)[A-Za-z./$]")
"""The beginning of a command that has an effect of its own."""
INTERPOLATED = re.compile(r"\$\{?(\w+)|\{(\w+)\}")
SPMD = f"{removed_apis.XR}.use_spmd"


class SetupRewriter:
    """Removes obsolete set-up, and marks what it cannot remove."""

    def __init__(self, names: NotebookNames, removals: Removals) -> None:
        self.names = names
        self.removals = removals
        self._gone: set[str] = set()
        """Global names whose assignment is removed."""
        self._done: set[cst.CSTNode] = set()
        """Statements that were rewritten."""
        self._lines: dict[tuple[int, int], cst.SimpleStatementLine] = {}
        for cell, node in names.walk():
            if cell.specials and isinstance(node, cst.SimpleStatementLine):
                self._lines[cell.index, cell.line_of(node.body[0])] = node
        self.old = any(self._is_setup(cell) for cell in names.cells)

    def apply(self) -> None:
        """Remove set-up: shell lines, assignments of variables, whole cells."""
        for cell in self.names.cells:
            if self._has_sign(cell):
                self._cell(cell)
        commands = {
            (cell.index, line): cell.command(line)
            for cell in self.names.cells
            for line in cell.specials
        }
        gone = {place: self.advice(command) for place, command in commands.items()}
        # The remaining commands must install a pair without the removed ones.
        halves = torch_installs.half_pairs(
            [(place, command) for place, command in commands.items() if gone[place] is None]
        )
        for cell in self.names.cells:
            for line in cell.specials:
                advice = gone[cell.index, line]
                if (cell.index, line) in halves:
                    if torch_installs.only_the_pair(cell.command(line)):
                        advice = f"{torch_installs.WHY}."
                    else:
                        cell.mark(line, f"{torch_installs.WHY}.")
                special = cell.specials[line]
                if advice is not None and not special.assigns:
                    command = cell.command(line)
                    in_shell = special.kind == "shell" or special.name == "pip"
                    if in_shell and self._does_more(command):
                        cell.mark(line, advice)
                    else:
                        self.removals.add(self._lines[cell.index, line], advice)
                elif special.kind in ("shell", "capture"):
                    for reason in _kept_reasons(cell.command(line)):
                        cell.mark(line, reason)
                elif removed_apis.is_node_address(cell.command(line), cell.command(line)):
                    cell.mark(line, removed_apis.ADDRESS_GONE)
        for cell in self.names.cells:
            self._form(cell)
        for cell, node in self.names.walk():
            if isinstance(node, (cst.Assign, cst.Expr, cst.Assert)) and node not in self.removals:
                self._variable(cell, node)

    def strings(self) -> None:
        """Mark the rest: removed variables that are read, removed commands in strings."""
        for cell, node in self.names.walk():
            if isinstance(node, cst.FormattedStringText) and node not in self.removals:
                self._address(cell, node, node.value)
            if not isinstance(node, cst.SimpleString) or node in self.removals:
                continue
            text = node.raw_value
            if text.startswith("pjrt://"):
                start, end = cell.span(node)
                cell.replace(start, end, cell.text[start:end].replace("pjrt://", "xla://", 1))
                cell.note(
                    cell.line_of(node), "pjrt:// → xla://; on a TPU v2 or v3, for one core only"
                )
                continue
            row = removed_apis.lookup_variable(text)
            if row is None and len(text) < 400:
                row = next(
                    (command for command in removed_apis.COMMANDS if command.old in text), None
                )
            if row is not None and row.new == SPMD and self.names.statement(node) in self._done:
                continue
            if row is not None and not _is_statement(self.names, node):
                cell.mark(self.names.line(node), f"{row.old}: {row.advice}")
            elif row is None and not _is_statement(self.names, node):
                self._address(cell, node, text)

    def _address(self, cell: CodeCell, node: cst.CSTNode, text: str) -> None:
        """Mark the address of a TPU node, unless the variable in the same statement is marked."""
        around = cell.code(self.names.statement(node))
        marked = any(
            f"{quote}{row.old}" in around for row in removed_apis.VARIABLES for quote in "'\""
        )
        if removed_apis.is_node_address(text, around) and not marked:
            cell.mark(self.names.line(node), removed_apis.ADDRESS_GONE)

    # Shell lines

    def advice(self, command: str) -> str | None:
        """The reason why a magic or shell line is no longer needed; None if it stays."""
        export = EXPORTS.match(command)
        if export is not None:
            row = removed_apis.lookup_variable(export.group(1))
            if row is not None and row.new != SPMD:
                return _retired(export.group(1), row)
            if export.group(1) == "LD_LIBRARY_PATH" and "/usr/local/lib" in command and self.old:
                return LIBRARIES
            return (
                removed_apis.ADDRESS_GONE
                if removed_apis.is_node_address(command, command)
                else None
            )
        if "torch_xla.distributed.xla_dist" in command or re.search(r"\bxla_dist\b", command):
            return _on_all_hosts(command)
        if any(row.old in command for row in removed_apis.COMMANDS):
            return SETUP
        if self._gone & {a or b for a, b in INTERPOLATED.findall(command)}:
            return SETUP
        if self.old and re.search(r"\bpip3? uninstall\b.*\btorch(?:_xla|vision)?\b", command):
            return UNINSTALL
        return None

    def _does_more(self, command: str) -> bool:
        """Whether a shell line also runs a command that is not obsolete set-up."""
        plain = _QUOTED.sub(lambda match: match[0].translate(_NO_ENDS), command)
        starts = [0, *(match.end() for match in _ENDS.finditer(plain))]
        ends = [*(match.start() for match in _ENDS.finditer(plain)), len(plain)]
        parts = [command[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        return any(map(_installs_more, parts)) or (
            len(parts) > 1
            and any(_COMMAND.match(part) and self.advice(part) is None for part in parts)
        )

    def script(self, cell: CodeCell) -> None:
        """Comment out obsolete commands in a `%%bash` cell."""
        last, last_advice = -2, ""
        index = 0
        while index < len(cell.lines):
            end = index
            while cell.lines[end].rstrip().endswith("\\") and end + 1 < len(cell.lines):
                end += 1
            line = " ".join(cell.lines[index : end + 1])
            advice = None if line.lstrip().startswith(("#", "%%")) else self.advice(line)
            if advice is not None and self._does_more(line):
                cell.mark(index, advice)
            elif advice is not None:
                if (last, last_advice) != (index - 1, advice):
                    cell.mark(index, advice, report=False)
                cell.note(index, f"commented out: {advice}")
                cell.comment_out(index, end)
                last, last_advice = end, advice
            elif not line.lstrip().startswith(("#", "%%")):
                for reason in _kept_reasons(line):
                    cell.mark(index, reason)
            index = end + 1

    # Whole cells

    def _is_setup(self, cell: CodeCell) -> bool:
        commands = [cell.command(line) for line in cell.specials]
        return self._has_sign(cell) or any(
            row.old in command for row in removed_apis.COMMANDS for command in commands
        )

    def _has_sign(self, cell: CodeCell) -> bool:
        assert cell.module is not None
        return any(
            sign in node.value
            for top in cell.module.body
            for node in nodes_of(top)
            if isinstance(node, (cst.SimpleString, cst.Name))
            for sign in SIGNS
        )

    def _cell(self, cell: CodeCell) -> None:
        """Remove a set-up cell of 2020, except imports and names that other cells use."""
        assert cell.module is not None
        kept: set[cst.CSTNode] = set()
        body: list[cst.CSTNode] = list(cell.module.body)
        for top in body:
            if isinstance(top, cst.SimpleStatementLine) and isinstance(
                top.body[0], (cst.Import, cst.ImportFrom)
            ):
                kept.add(top)
        scope = next(
            (
                assignment
                for assignment in self.names.scopes.values()
                if isinstance(assignment, GlobalScope)
            ),
            None,
        )
        readers: dict[cst.CSTNode, set[cst.CSTNode]] = {}
        bound: dict[cst.CSTNode, set[str]] = {}
        for assignment in scope.assignments if scope is not None else ():
            node = getattr(assignment, "node", None)
            if (
                node is None
                or node not in self.names.parents
                or self.names.cell_of(node) is not cell
            ):
                continue
            top = self.names.top(node)
            bound.setdefault(top, set()).add(assignment.name)
            readers.setdefault(top, set()).update(access.node for access in assignment.references)
        grown = True
        while grown:
            grown = False
            for top in body:
                if top not in kept and any(
                    self.names.cell_of(node) is not cell or self.names.top(node) in kept
                    for node in readers.get(top, ())
                ):
                    kept.add(top)
                    grown = True
        for top in body:
            if top not in kept and not self._stays(cell, top):
                self.removals.add(top, SETUP)
                self._gone |= bound.get(top, set())

    def _stays(self, cell: CodeCell, top: cst.CSTNode) -> bool:
        """Whether a statement of a set-up cell is a shell line unrelated to the set-up."""
        special = cell.specials.get(self.names.line(top))
        if special is None:
            return False
        command = cell.command(special.line)
        install = re.match(r"\s*%?pip3? install", command)
        return install is not None and "torch" not in command.lower() and "$" not in command

    def _form(self, cell: CodeCell) -> None:
        """Remove `VERSION = "nightly"  #@param` if only a removed shell line reads it."""
        commands = {line: cell.command(line) for line in cell.specials}
        for (index, _), statement in self._lines.items():
            (small, *others) = statement.body
            if index != cell.index or others or not isinstance(small, cst.Assign):
                continue
            target = small.targets[0].target
            scope = self.names.scopes.get(target)
            if not isinstance(target, cst.Name) or not isinstance(scope, GlobalScope):
                continue
            reading = {
                where
                for where, command in commands.items()
                if target.value in {a or b for a, b in INTERPOLATED.findall(command)}
            }
            elsewhere = any(
                target.value in {a or b for a, b in INTERPOLATED.findall(other.command(where))}
                for other in self.names.cells
                if other is not cell
                for where in other.specials
            )
            used = any(assignment.references for assignment in scope[target.value])
            if (
                reading
                and not used
                and not elsewhere
                and all(self._lines[index, where] in self.removals for where in reading)
            ):
                self.removals.add(statement, SETUP)

    # Variables

    def _variable(self, cell: CodeCell, node: cst.Assign | cst.Expr | cst.Assert) -> None:
        if isinstance(node, cst.Assert):
            if "COLAB_TPU_ADDR" in cell.code(node.test):
                self.removals.remove(node, "A TPU is now part of the machine and has no address.")
            return
        name, value = _setting(node)
        row = removed_apis.lookup_variable(name) if name else None
        if row is None:
            if name == "LD_LIBRARY_PATH" and self.old and value and "/usr/local/lib" in value:
                self.removals.remove(node, LIBRARIES)
        elif row.new == SPMD and value is not None and value.strip("'\"") not in ("0", ""):
            return  # rewritten later
        elif row.state == "ignored":
            self.removals.remove(node, f"{name} has no effect now. {row.advice}")
        else:
            self.removals.remove(node, f"{name} is retired. {row.advice}")

    def spmd(self, imports: NotebookImports) -> None:
        """`os.environ['XLA_USE_SPMD'] = '1'` → `xr.use_spmd()`."""
        for cell, node in self.names.walk():
            if not isinstance(node, (cst.Assign, cst.Expr)) or node in self.removals:
                continue
            name, _ = _setting(node)
            row = removed_apis.lookup_variable(name) if name else None
            if row is not None and row.new == SPMD:
                line = cell.line_of(node)
                if not imports.has("torch_xla.runtime", "xr", cell, line):
                    cell.insert_above(line, "import torch_xla.runtime as xr")
                cell.replace_node(node, "xr.use_spmd()")
                self._done.add(self.names.statement(node))
                cell.note(line, "XLA_USE_SPMD → xr.use_spmd()")
        for cell in self.names.cells:
            for line, special in cell.specials.items():
                export = EXPORTS.match(cell.command(line))
                if special.kind == "magic" and export and export.group(1) == "XLA_USE_SPMD":
                    if not imports.has("torch_xla.runtime", "xr", cell, line):
                        cell.insert_above(line, "import torch_xla.runtime as xr")
                    start = cell.offset(line, len(special.before))
                    cell.replace(
                        start, start + len(cell.lines[line]) - len(special.before), "xr.use_spmd()"
                    )
                    cell.note(line, "XLA_USE_SPMD → xr.use_spmd()")


def _retired(name: str, row: removed_apis.RemovedApi) -> str:
    what = "has no effect now" if row.state == "ignored" else "is retired"
    return f"{name} {what}. {row.advice}"


def _kept_reasons(command: str) -> list[str]:
    """Return what is obsolete in a command that stays: variables set for it, addresses."""
    names = [
        name
        for match in _SET_FOR_COMMAND.finditer(command)
        for name in re.findall(r"(?:^|\s)(\w+)=", match[1])
    ]
    rows = [(name, removed_apis.lookup_variable(name)) for name in dict.fromkeys(names)]
    reasons = [_retired(name, row) for name, row in rows if row is not None]
    if not reasons and removed_apis.is_node_address(command, command):
        reasons.append(removed_apis.ADDRESS_GONE)
    return reasons


def _setting(node: cst.Assign | cst.Expr) -> tuple[str, str | None]:
    """The environment variable that a statement sets, and the text of its value."""
    if isinstance(node, cst.Assign):
        target = node.targets[0].target
        if (
            isinstance(target, cst.Subscript)
            and dotted(target.value).endswith("environ")
            and len(target.slice) == 1
            and isinstance(target.slice[0].slice, cst.Index)
        ):
            return _string(target.slice[0].slice.value), _text(node.value)
        return "", None
    call = node.value
    if isinstance(call, cst.Call) and len(call.args) == 2:
        function = dotted(call.func)
        if function.endswith(("environ.setdefault", "putenv")):
            return _string(call.args[0].value), _text(call.args[1].value)
    return "", None


def _installs_more(command: str) -> bool:
    """Whether pip also installs packages other than torch's in an obsolete command."""
    match = re.match(r"%?(?:python3? -m )?pip3? install\s+(.*)", command.lstrip("! "))
    return match is not None and any(
        re.match(r"[A-Za-z]", word)
        and not re.match(r"torch", word)
        and "://" not in word
        and not word.endswith(".whl")
        and not any(row.old in word for row in removed_apis.COMMANDS)
        for word in match[1].replace('"', " ").replace("'", " ").split()
    )


def _string(node: cst.BaseExpression) -> str:
    return node.raw_value if isinstance(node, cst.SimpleString) else ""


def _text(node: cst.BaseExpression) -> str:
    return cst.Module([]).code_for_node(node)


def _is_statement(names: NotebookNames, node: cst.CSTNode) -> bool:
    """Whether a string is a docstring, or is never read."""
    return isinstance(names.parents[node], cst.Expr)


def _on_all_hosts(command: str) -> str:
    """The advice for a command line of xla_dist: the same command on each host."""
    tpu = re.search(r"--tpu[= ](\S+)", command)
    _, dashes, run = command.partition(" -- ")
    name = tpu.group(1) if tpu else "NAME"
    run = run.strip().replace("'", '"') if dashes else "python3 train.py"
    return (
        "xla_dist was removed. Copy the code to the hosts and run it on each: `gcloud compute tpus "
        f"tpu-vm ssh {name} --worker=all --command='{run}'`"
    )
