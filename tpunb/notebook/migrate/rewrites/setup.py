"""Removes the obsolete set-up of a TPU: shell lines, variables, and set-up cells of 2020."""

from __future__ import annotations

import ast
import re

from tpunb.notebook import removed_apis, torch_installs
from tpunb.notebook.migrate.cell import CodeCell, line_of
from tpunb.notebook.migrate.imports import Import, NotebookImports
from tpunb.notebook.migrate.names import NotebookNames
from tpunb.notebook.migrate.statements import Removals
from tpunb.notebook.scopes import dotted

SIGNS = ("tpu-pytorch/wheels", "update_server_xrt", "_VersionConfig", ":8475/requestversion")
"""Text that only occurs in cells which install the XRT runtime by hand, as in 2019 and 2020."""
SETUP = (
    "XRT and its set-up no longer exist. Colab and Kaggle have torch and torch_xla installed; "
    f"elsewhere: {removed_apis.INSTALL_PAIR}."
)
UNINSTALL = "The installed torch matches the installed torch_xla."
BACKEND = "pjrt:// → xla://; on a TPU v2 or v3, for one core only"
LIBRARIES = "The XRT runtime, whose libraries were in this folder, no longer exists."
NO_ADDRESS = "A TPU is now part of the machine and has no address."
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
        self._done: set[ast.AST] = set()
        """Statements that were rewritten."""
        self._commands = {
            (cell.index, line): cell.command(line)
            for cell in names.cells.values()
            for line in cell.specials
        }
        """The texts of magics and shell lines, by cell and line (from 0)."""
        self._statements = {
            (cell.index, line_of(node)): node
            for cell, node in names.walk()
            if isinstance(node, ast.stmt) and line_of(node) in cell.specials
        }
        """The statements that stand for magics and shell lines."""
        self._signed = [cell for cell in names.cells.values() if _has_sign(cell)]
        commands = "\n".join(self._commands.values())
        self.old = bool(self._signed) or any(row.old in commands for row in removed_apis.COMMANDS)

    def apply(self) -> None:
        """Remove set-up: shell lines, assignments of variables, whole cells."""
        for cell in self._signed:
            self._cell(cell)
        gone = {place: self.advice(command) for place, command in self._commands.items()}
        # The remaining commands must install a pair without the removed ones.
        halves = torch_installs.half_pairs(
            [(place, text) for place, text in self._commands.items() if gone[place] is None]
        )
        for (index, line), command in self._commands.items():
            cell, advice = self.names.cells[index], gone[index, line]
            if (index, line) in halves:
                if torch_installs.only_the_pair(command):
                    advice = f"{torch_installs.WHY}."
                else:
                    cell.mark(line, f"{torch_installs.WHY}.")
            special = cell.specials[line]
            if advice is not None and not special.assigns:
                in_shell = special.kind == "shell" or special.name == "pip"
                if in_shell and self._does_more(command):
                    cell.mark(line, advice)
                else:
                    self.removals.add(self._statements[index, line], advice)
            elif special.kind in ("shell", "capture"):
                for reason in _kept_reasons(command):
                    cell.mark(line, reason)
            elif removed_apis.is_node_address(command, command):
                cell.mark(line, removed_apis.ADDRESS_GONE)
        for cell, node in self.names.walk():
            if isinstance(node, ast.Assign | ast.Expr | ast.Assert) and node not in self.removals:
                if isinstance(node, ast.Assign):
                    self._form(cell, node)
                self._variable(cell, node)

    def strings(self) -> None:
        """Mark the rest: removed variables that are read, removed commands in strings."""
        for cell, node in self.names.walk():
            if not isinstance(node, ast.Constant) or node in self.removals:
                continue
            text, parent = node.value, self.names.parents[node]
            if not isinstance(text, str):
                continue
            if isinstance(parent, ast.JoinedStr):
                self._address(cell, node, text)
                continue
            if text.startswith("pjrt://"):
                cell.replace_node(node, cell.code(node).replace("pjrt://", "xla://", 1))
                cell.note(line_of(node), BACKEND)
                continue
            if isinstance(parent, ast.Expr):  # a docstring, or a string that is never read
                continue
            row = removed_apis.lookup_variable(text)
            if row is None and len(text) < 400:
                commands = (command for command in removed_apis.COMMANDS if command.old in text)
                row = next(commands, None)
            if row is None:
                self._address(cell, node, text)
            elif row.new != SPMD or self.names.statement(node) not in self._done:
                cell.mark(self.names.line(node), f"{row.old}: {row.advice}")

    def _address(self, cell: CodeCell, node: ast.AST, text: str) -> None:
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
            address = removed_apis.is_node_address(command, command)
            return removed_apis.ADDRESS_GONE if address else None
        if re.search(r"\bxla_dist\b", command):
            return _on_all_hosts(command)
        if any(row.old in command for row in removed_apis.COMMANDS) or (
            self._gone & _interpolated(command)
        ):
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

    def _cell(self, cell: CodeCell) -> None:
        """Remove a set-up cell of 2020, except imports and names that other cells use."""
        scope = self.names.scopes.globals
        readers: dict[ast.stmt, set[ast.AST]] = {top: set() for top in cell.tree.body}
        bound: dict[ast.stmt, set[str]] = {top: set() for top in cell.tree.body}
        for name, bindings in scope.bindings.items():
            for binding in bindings:
                if self.names.cell_of(binding.node) is cell:
                    top = self.names.top(binding.node)
                    bound[top].add(name)
                    readers[top].update(self.names.references(name, scope))
        lines = {top: self.names.same_line(top) for top in cell.tree.body}
        kept: set[ast.stmt] = {top for top in cell.tree.body if isinstance(top, Import)}
        waiting = [top for top in cell.tree.body if top not in kept]
        while needed := {
            top
            for top in waiting
            if kept.intersection(lines[top])
            or any(
                self.names.cell_of(node) is not cell or self.names.top(node) in kept
                for node in readers[top]
            )
        }:
            kept |= needed
            waiting = [top for top in waiting if top not in kept]
        for top in waiting:
            if not _is_unrelated(self._commands.get((cell.index, self.names.line(top)))):
                self.removals.add(top, SETUP)
                self._gone |= bound[top]

    def _form(self, cell: CodeCell, node: ast.Assign) -> None:
        """Remove `VERSION = "nightly"  #@param` if only a removed shell line reads it."""
        target = node.targets[0]
        if (
            not isinstance(target, ast.Name)
            or not self.names.is_alone(node)
            or self.names.scope(target) is not self.names.scopes.globals
            or self.names.references(target.id, self.names.scopes.globals)
        ):
            return
        reading = [
            place for place, text in self._commands.items() if target.id in _interpolated(text)
        ]
        if reading and all(
            index == cell.index and self._statements[index, line] in self.removals
            for index, line in reading
        ):
            self.removals.add(node, SETUP)

    # Variables

    def _variable(self, cell: CodeCell, node: ast.Assign | ast.Expr | ast.Assert) -> None:
        if isinstance(node, ast.Assert):
            if "COLAB_TPU_ADDR" in cell.code(node.test):
                self.removals.add(node, NO_ADDRESS)
            return
        name, value = _setting(node)
        row = removed_apis.lookup_variable(name) if name else None
        if row is None:
            if name == "LD_LIBRARY_PATH" and self.old and "/usr/local/lib" in value:
                self.removals.add(node, LIBRARIES)
        elif row.new != SPMD or value in ("'0'", "''", "0"):  # the others are rewritten later
            self.removals.add(node, _retired(name, row))

    def spmd(self, imports: NotebookImports) -> None:
        """`os.environ['XLA_USE_SPMD'] = '1'` → `xr.use_spmd()`."""
        for cell, node in self.names.walk():
            if isinstance(node, ast.Assign | ast.Expr) and node not in self.removals:
                row = removed_apis.lookup_variable(_setting(node)[0])
                if row is not None and row.new == SPMD:
                    self._done.add(node)
                    self._use_spmd(cell, line_of(node), cell.bare_span(node), imports)
        for (index, line), command in self._commands.items():
            cell, export = self.names.cells[index], EXPORTS.match(command)
            special = cell.specials[line]
            if special.kind == "magic" and export and export.group(1) == "XLA_USE_SPMD":
                span = cell.line_span(line)
                self._use_spmd(cell, line, (span[0] + len(special.before), span[1]), imports)

    def _use_spmd(
        self, cell: CodeCell, line: int, span: tuple[int, int], imports: NotebookImports
    ) -> None:
        if not imports.has("torch_xla.runtime", "xr", cell, line):
            cell.insert_above(line, "import torch_xla.runtime as xr")
        cell.replace(*span, "xr.use_spmd()")
        cell.note(line, "XLA_USE_SPMD → xr.use_spmd()")


def _has_sign(cell: CodeCell) -> bool:
    return any(sign in ast.unparse(cell.tree) for sign in SIGNS)


def _is_unrelated(command: str | None) -> bool:
    """Whether a shell line in a set-up cell installs something that has nothing to do with it."""
    install = re.match(r"\s*%?pip3? install", command or "")
    return bool(command and install and "torch" not in command.lower() and "$" not in command)


def _interpolated(command: str) -> set[str]:
    """The variables that a shell line reads: `$x`, `{x}`."""
    return {a or b for a, b in INTERPOLATED.findall(command)}


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


def _setting(node: ast.Assign | ast.Expr) -> tuple[str, str]:
    """The environment variable that a statement sets, and the code of its value."""
    match node:
        case ast.Assign(targets=[ast.Subscript(environ, ast.Constant(str(name))), *_]):
            if dotted(environ).endswith("environ"):
                return name, ast.unparse(node.value)
        case ast.Expr(ast.Call(function, [ast.Constant(str(name)), value], [])):
            if dotted(function).endswith(("environ.setdefault", "putenv")):
                return name, ast.unparse(value)
    return "", ""


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
