"""Lint rules on saving checkpoints."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.names import argument, call, dotted, for_other_hardware, last_part
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import Site


@rule(
    "torch-save-on-xla",
    "warning",
    what="torch.save of a model that is on an XLA device",
    fact="the file contains XLA tensors and cannot be loaded without torch_xla; on several cores "
    "every rank writes the same file at once",
    source="measured with torch_xla 2.9.0: torch.load gives tensors of xla:0; aws-neuron-sdk#1315",
    fix="write `xm.save(model.state_dict(), path)` on every rank, or move it to the CPU first",
)
def _torch_save_on_xla(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.xla or not notebook.device_uses:
        return
    for site in notebook.calls_of("torch.save"):
        node = call(site)
        if not node.args or not _mentions_device(notebook, node.args[0], site):
            continue
        if for_other_hardware(site):
            continue
        yield Hit(site, "`torch.save` gets tensors that are on the XLA device")


def _mentions_device(notebook: NotebookIndex, value: ast.expr, site: Site) -> bool:
    """Whether a value contains the state of a model that is on an XLA device."""
    inner = {last_part(part.func) for part in ast.walk(value) if isinstance(part, ast.Call)}
    if inner & {"cpu", "to", "_maybe_convert_to_cpu", "tree_map"}:
        return False
    if isinstance(value, ast.Name):
        values = notebook.values(value.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.Call | ast.Dict) and _mentions_device(notebook, v.node, v)
            for v in values
        )
    if isinstance(value, ast.DictComp):
        return False
    for part in ast.walk(value):
        if isinstance(part, ast.Call) and last_part(part.func) == "state_dict":
            assert isinstance(part.func, ast.Attribute | ast.Name)
            model = dotted(part.func.value) if isinstance(part.func, ast.Attribute) else ""
            if model and _is_moved(notebook, model, site):
                return True
    return False


def _is_moved(notebook: NotebookIndex, model: str, site: Site) -> bool:
    """Whether the last move of a model before a site is to an XLA device."""
    moves = []
    for name in ("to", "cpu"):
        for other in notebook.called.get(name, ()):
            function = call(other).func
            if not isinstance(function, ast.Attribute):
                continue
            moved = dotted(function.value) == model or any(
                value.node is other.node for value in notebook.values(model, site.frame)
            )
            same = other.frame.function is site.frame.function
            before = (other.cell.index, other.line) < (site.cell.index, site.line)
            if moved and same and before:
                moves.append(other)
    if not moves:
        return False
    final = max(moves, key=lambda other: (other.cell.index, other.line))
    target = argument(call(final), "device", 0)
    return target is not None and notebook.is_xla_device(target, final)


@rule(
    "load-to-xla",
    "error",
    what="torch.load with `map_location` an XLA device",
    fact="RuntimeError: don't know how to restore data location of "
    "torch.storage.UntypedStorage (tagged with xla:0)",
    source="measured with torch 2.9.0 and torch_xla 2.9.0",
    fix="write `torch.load(path, map_location='cpu')`, and move the model to the device afterwards",
    kernel=True,
)
def _load_to_xla(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of("torch.load"):
        target = argument(call(site), "map_location", 1)
        if target is None or not _only_xla(notebook, target, site):
            continue
        yield Hit(site, "torch.load cannot put tensors on an XLA device")


def _only_xla(notebook: NotebookIndex, node: ast.expr, site: Site) -> bool:
    if isinstance(node, ast.IfExp):
        return all(_only_xla(notebook, part, site) for part in (node.body, node.orelse))
    if isinstance(node, ast.Name):
        values = notebook.values(node.id, site.frame)
        return bool(values) and all(
            isinstance(v.node, ast.expr) and notebook.is_xla_device(v.node, v) for v in values
        )
    return notebook.is_xla_device(node, site)
