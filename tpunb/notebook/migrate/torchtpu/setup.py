"""Set-up of torch_xla that TorchTPU does not need: variables, installs, strings."""

from __future__ import annotations

import ast
import re

from tpunb.notebook.convert import magics
from tpunb.notebook.migrate.cell import CodeCell, line_of
from tpunb.notebook.migrate.names import arguments
from tpunb.notebook.migrate.report import MARK
from tpunb.notebook.migrate.rewrites.calls import remove_argument
from tpunb.notebook.migrate.statements import Removals
from tpunb.notebook.migrate.torchtpu.edits import Edits
from tpunb.notebook.scopes import argument, last_part, literal

INSTALL = "TorchTPU is installed with `pip install torch_tpu`."
NO_EFFECT = "TorchTPU does not read this variable of torch_xla."
FLOAT32 = (
    "XLA_USE_BF16 made everything bfloat16. TorchTPU computes in float32 until you write "
    "`model.to(torch.bfloat16)` or `with torch.autocast('tpu', dtype=torch.bfloat16):`."
)
_VARIABLE = re.compile(r"\b(?:PJRT_|XLA_|XRT_|LIBTPU_INIT_ARGS|COLAB_TPU_ADDR)")
GROUP = "tpu_dist"
"""The backend of process groups for tensors on TPUs."""
_INSTALLS = re.compile(r"torch[_-]xla|cloud[-_]tpu[-_]client|env-setup\.py|tpu-pytorch|libtpu")
_DEVICE = re.compile(r"xla(:\d+)?")
_TAKE_DEVICE = ("device", "to", "autocast", "init_device_mesh", "DeviceMesh", "Generator")
_DEVICE_WORDS = ("device", "device_type", "map_location")


def remove_variables(edits: Edits, removals: Removals) -> None:
    """Comment out statements that only set or read variables of torch_xla."""
    for _, node in edits.names.walk():
        if isinstance(node, ast.Assign | ast.Expr | ast.Assert | ast.Delete):
            _variable(edits, removals, node)


def rewrite_strings(edits: Edits, group: str) -> None:
    """Rewrite the device "xla", process groups with that backend to the backend `group`, and
    `torch.compile(…, backend="openxla")`.
    """
    for _, node in edits.names.walk():
        if isinstance(node, ast.Call) and last_part(node.func) == "init_process_group":
            _group(edits, node, group)
        elif isinstance(node, ast.Call) and last_part(node.func) == "compile":
            _compiler(edits, node)
    for _, node in edits.names.walk():
        if isinstance(node, ast.Constant) and node not in edits.done:
            _string(edits, node)


def _variable(edits: Edits, removals: Removals, node: ast.stmt) -> None:
    scopes = edits.names.scopes
    names = []
    if isinstance(node, ast.Assign) and not all(isinstance(t, ast.Subscript) for t in node.targets):
        return  # the name may be used
    for part in ast.walk(node):
        scope = edits.names.scope(part)
        if (
            isinstance(part, ast.Subscript)
            and edits.names.scopes.written(part.value) == "os.environ"
        ):
            names.append(literal(part.slice))
        elif isinstance(part, ast.Call) and scope is not None:
            full = scopes.full_or_written(part.func, scope)
            if full.startswith("os.environ.") or full in ("os.putenv", "os.getenv"):
                names.append(literal(argument(part, "key", 0)))
    own = [name for name in names if isinstance(name, str) and _VARIABLE.match(name)]
    if own and len(own) == len(names):
        removals.add(node, FLOAT32 if "BF16" in own[0] else NO_EFFECT)
        edits.done |= set(ast.walk(node))


def _group(edits: Edits, call: ast.Call, group: str) -> None:
    """`init_process_group("xla", init_method="xla://")`."""
    backend = argument(call, "backend", 0)
    method = literal(argument(call, "init_method", 1))
    if literal(backend) != "xla" and method not in ("xla://", "pjrt://"):
        return
    if edits.code.starts and not edits.code.has_group and "dist" in edits.modules:
        edits.drop(call, "removed: the group is there already")
        return
    written = edits.names.cell_of(call).code(call.func)
    edits.fill(call, f'{written}("{group}")')


def _compiler(edits: Edits, call: ast.Call) -> None:
    if call in edits.done or edits.names.full_names(call.func) != {"torch.compile"}:
        return
    given = arguments(call)
    for at, one in enumerate(given):
        if one.name == "backend" and literal(one.value) == "openxla":
            cell = edits.names.cell_of(call)
            remove_argument(cell, given, at)
            cell.note(line_of(call), "backend='openxla' removed: the default is TorchTPU's")


def _string(edits: Edits, node: ast.Constant) -> None:
    """`"xla"` and `"xla:0"` where a device is expected."""
    if not isinstance(node.value, str) or not _DEVICE.fullmatch(node.value):
        return
    parent = edits.names.parents[node]
    if isinstance(parent, ast.Call):
        if last_part(parent.func) not in _TAKE_DEVICE or parent.args[:1] != [node]:
            return
    elif isinstance(parent, ast.keyword):
        if parent.arg not in _DEVICE_WORDS:
            return
    elif isinstance(parent, ast.Assign | ast.AnnAssign):
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        if not any("device" in last_part(target).lower() for target in targets):
            return
    elif not isinstance(parent, ast.Compare | ast.arguments | ast.IfExp):
        return
    edits.fill(node, '"tpu"')


def rewrite_commands(edits: Edits) -> None:
    """Comment out magics and shell lines that install torch_xla or set its variables."""
    for cell in edits.names.cells.values():
        _commands(cell)


def _commands(cell: CodeCell) -> None:
    for line, special in cell.specials.items():
        text = cell.command(line)
        advice = ""
        if re.search(r"\bpip3?\b|\bapt|curl|wget|gsutil|env-setup", text) and _INSTALLS.search(
            text
        ):
            advice = INSTALL
        elif re.match(r"%?(?:env|set_env|export)\b", text) and _VARIABLE.search(text):
            advice = FLOAT32 if "BF16" in text else NO_EFFECT
        if (
            advice
            and special.count == 1
            and not special.assigns
            and special.name not in magics.TIMED
        ):
            cell.mark(line, advice, report=False)
            cell.comment_out(line, line)
            cell.note(line, f"commented out: {advice}")
            if cell.indent(line):
                cell.insert_below(line, "pass", cell.indent(line))


def mark_rest(cell: CodeCell) -> None:
    """Report a cell that is not Python and names torch_xla."""
    for line, text in enumerate(cell.lines):
        if "torch_xla" in text and not text.lstrip().startswith(MARK.rstrip()):
            cell.note(line, f"this is not Python: rewrite it by hand. {INSTALL}", "skipped")
            return
