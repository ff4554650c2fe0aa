"""What notebooks once did to set a TPU up: shell lines, variables, and the cells of 2020."""

from __future__ import annotations

import re

import libcst as cst
from libcst.metadata import GlobalScope

from tpunb import retired
from tpunb.migrate.cells import CodeCell
from tpunb.migrate.imports import Imports
from tpunb.migrate.names import Names, dotted, nodes_of
from tpunb.migrate.statements import Retirements

SIGNS = ("tpu-pytorch/wheels", "update_server_xrt", "_VersionConfig", ":8475/requestversion")
"""What only cells have that install the XRT runtime by hand, as in 2019 and 2020."""
SETUP = (
    "XRT and its set-up are gone. Colab and Kaggle have torch and torch_xla installed; elsewhere: "
    "`pip install torch==2.9.0 torch_xla[tpu]==2.9.0`."
)
UNINSTALL = "The torch that is installed fits the torch_xla that is installed."
OLD_TORCH = "torch_xla 2.9 needs torch 2.9: an older torch in its place cannot be used with a TPU."
LIBRARIES = "The XRT runtime is gone, and with it the libraries that were found there."
EXPORTS = re.compile(r"^\s*(?:export|%env|%set_env)\s+(\w+)[=\s]")
OLD_PIN = re.compile(r"\btorch==[01]\.")
INTERPOLATED = re.compile(r"\$\{?(\w+)|\{(\w+)\}")
SPMD = f"{retired.XR}.use_spmd"


class Setup:
    """Finds what is to be taken out, and marks what cannot be."""

    def __init__(self, names: Names, retirements: Retirements) -> None:
        self.names = names
        self.retirements = retirements
        self._gone: set[str] = set()
        """Global names whose assignment is taken out."""
        self._done: set[cst.CSTNode] = set()
        """Statements that were rewritten."""
        self._lines: dict[tuple[int, int], cst.SimpleStatementLine] = {}
        for cell, node in names.walk():
            if cell.specials and isinstance(node, cst.SimpleStatementLine):
                self._lines[cell.index, cell.line_of(node.body[0])] = node
        self.old = any(self._is_setup(cell) for cell in names.cells)

    def apply(self) -> None:
        """Take set-up out: shell lines, assignments of variables, whole cells."""
        for cell in self.names.cells:
            if self._has_sign(cell):
                self._cell(cell)
        for cell in self.names.cells:
            for line in cell.specials:
                advice = self.advice(cell.command(line))
                if advice is not None and not cell.specials[line].assigns:
                    self.retirements.add(self._lines[cell.index, line], advice)
                elif OLD_PIN.search(cell.command(line)) and "pip" in cell.command(line):
                    cell.mark(line, OLD_TORCH)
        for cell in self.names.cells:
            self._form(cell)
        for cell, node in self.names.walk():
            if (
                isinstance(node, (cst.Assign, cst.Expr, cst.Assert))
                and node not in self.retirements
            ):
                self._variable(cell, node)

    def strings(self) -> None:
        """Mark what is left: retired variables that are read, retired commands in strings."""
        for cell, node in self.names.walk():
            if not isinstance(node, cst.SimpleString) or node in self.retirements:
                continue
            text = node.raw_value
            if text.startswith("pjrt://"):
                start, end = cell.span(node)
                cell.replace(start, end, cell.text[start:end].replace("pjrt://", "xla://", 1))
                cell.note(cell.line_of(node), "pjrt:// → xla://")
                continue
            row = retired.variable(text)
            if row is None and len(text) < 400:
                row = next((one for one in retired.COMMANDS if one.old in text), None)
            if row is not None and row.new == SPMD and self.names.statement(node) in self._done:
                continue
            if row is not None and not _is_statement(self.names, node):
                cell.mark(self.names.line(node), f"{row.old}: {row.advice}")

    # Shell lines

    def advice(self, command: str) -> str | None:
        """Why a magic or shell line is not needed any more; None: it stays."""
        export = EXPORTS.match(command)
        if export is not None:
            row = retired.variable(export.group(1))
            if row is not None and row.new != SPMD:
                return (
                    f"{row.old} has no use here. {row.advice}"
                    if row.state == "ignored"
                    else (f"{row.old} is retired. {row.advice}")
                )
            if export.group(1) == "LD_LIBRARY_PATH" and "/usr/local/lib" in command and self.old:
                return LIBRARIES
            return None
        if "torch_xla.distributed.xla_dist" in command or re.search(r"\bxla_dist\b", command):
            return _on_all_hosts(command)
        if any(row.old in command for row in retired.COMMANDS):
            return SETUP
        if self._gone & {a or b for a, b in INTERPOLATED.findall(command)}:
            return SETUP
        if self.old and re.search(r"\bpip3? uninstall\b.*\btorch(?:_xla|vision)?\b", command):
            return UNINSTALL
        return None

    def script(self, cell: CodeCell) -> None:
        """Take retired lines out of a `%%bash` cell."""
        last, last_advice = -2, ""
        index = 0
        while index < len(cell.lines):
            end = index
            while cell.lines[end].rstrip().endswith("\\") and end + 1 < len(cell.lines):
                end += 1
            line = " ".join(cell.lines[index : end + 1])
            advice = None if line.lstrip().startswith(("#", "%%")) else self.advice(line)
            if advice is not None:
                if (last, last_advice) != (index - 1, advice):
                    cell.mark(index, advice, report=False)
                cell.note(index, f"commented out: {advice}")
                cell.comment_out(index, end)
                last, last_advice = end, advice
            index = end + 1

    # Whole cells

    def _is_setup(self, cell: CodeCell) -> bool:
        commands = [cell.command(line) for line in cell.specials]
        return self._has_sign(cell) or any(
            row.old in command for row in retired.COMMANDS for command in commands
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
        """Take a set-up cell of 2020 out, except imports and what other cells use."""
        assert cell.module is not None
        kept: set[cst.CSTNode] = set()
        body: list[cst.CSTNode] = list(cell.module.body)
        for top in body:
            if isinstance(top, cst.SimpleStatementLine) and isinstance(
                top.body[0], (cst.Import, cst.ImportFrom)
            ):
                kept.add(top)
        scope = next(
            (one for one in self.names.scopes.values() if isinstance(one, GlobalScope)), None
        )
        readers: dict[cst.CSTNode, set[cst.CSTNode]] = {}
        bound: dict[cst.CSTNode, set[str]] = {}
        for one in scope.assignments if scope is not None else ():
            node = getattr(one, "node", None)
            if (
                node is None
                or node not in self.names.parents
                or self.names.cell_of(node) is not cell
            ):
                continue
            top = self.names.top(node)
            bound.setdefault(top, set()).add(one.name)
            readers.setdefault(top, set()).update(access.node for access in one.references)
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
                self.retirements.add(top, SETUP)
                self._gone |= bound.get(top, set())

    def _stays(self, cell: CodeCell, top: cst.CSTNode) -> bool:
        """A shell line in a set-up cell that has nothing to do with the set-up."""
        special = cell.specials.get(self.names.line(top))
        if special is None:
            return False
        command = cell.command(special.line)
        install = re.match(r"\s*%?pip3? install", command)
        return install is not None and "torch" not in command.lower() and "$" not in command

    def _form(self, cell: CodeCell) -> None:
        """`VERSION = "nightly"  #@param` that only a retired shell line reads."""
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
            used = any(one.references for one in scope[target.value])
            if (
                reading
                and not used
                and not elsewhere
                and all(self._lines[index, where] in self.retirements for where in reading)
            ):
                self.retirements.add(statement, SETUP)

    # Variables

    def _variable(self, cell: CodeCell, node: cst.Assign | cst.Expr | cst.Assert) -> None:
        if isinstance(node, cst.Assert):
            if "COLAB_TPU_ADDR" in cell.code(node.test):
                self.retirements.retire(
                    node, "A TPU is part of the machine now, without an address."
                )
            return
        name, value = _setting(node)
        row = retired.variable(name) if name else None
        if row is None:
            if name == "LD_LIBRARY_PATH" and self.old and value and "/usr/local/lib" in value:
                self.retirements.retire(node, LIBRARIES)
        elif row.new == SPMD and value is not None and value.strip("'\"") not in ("0", ""):
            return  # rewritten later
        elif row.state == "ignored":
            self.retirements.retire(node, f"{name} has no effect now. {row.advice}")
        else:
            self.retirements.retire(node, f"{name} is retired. {row.advice}")

    def spmd(self, imports: Imports) -> None:
        """`os.environ['XLA_USE_SPMD'] = '1'` → `xr.use_spmd()`."""
        for cell, node in self.names.walk():
            if not isinstance(node, (cst.Assign, cst.Expr)) or node in self.retirements:
                continue
            name, _ = _setting(node)
            row = retired.variable(name) if name else None
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


def _string(node: cst.BaseExpression) -> str:
    return node.raw_value if isinstance(node, cst.SimpleString) else ""


def _text(node: cst.BaseExpression) -> str:
    return cst.Module([]).code_for_node(node)


def _is_statement(names: Names, node: cst.CSTNode) -> bool:
    """A docstring, or a text that nothing reads."""
    return isinstance(names.parents[node], cst.Expr)


def _on_all_hosts(command: str) -> str:
    """What stands for a command line of xla_dist: the same command on each host."""
    tpu = re.search(r"--tpu[= ](\S+)", command)
    _, dashes, run = command.partition(" -- ")
    name = tpu.group(1) if tpu else "NAME"
    run = run.strip().replace("'", '"') if dashes else "python3 train.py"
    return (
        f"xla_dist is gone. Copy the code to the hosts and run it on each: `gcloud compute tpus "
        f"tpu-vm ssh {name} --worker=all --command='{run}'`"
    )
