"""`MpDeviceLoader(loader, device)` → the loader, whose batches the loop moves to the device.

Where the loops over it cannot all be seen, or unpack something nested, the notebook gets the class
`OnDevice` instead.
"""

from __future__ import annotations

import ast

from tpunb.notebook.migrate.cell import line_of
from tpunb.notebook.migrate.names import arguments
from tpunb.notebook.migrate.torchtpu.edits import Edits
from tpunb.notebook.scopes import last_part, literal

AROUND = ("enumerate", "tqdm")
"""Calls around a loader in the head of a loop."""
LONGEST = 4
"""Names in the head of a loop that get `.to(device)` in one line."""


def on_device(edits: Edits, call: ast.Call) -> bool:
    """Rewrite a loader that moves its batches."""
    given = edits.given(call, "loader", "device")
    if given is None or not given.keys() & {"loader", "cpu_loader"}:
        return False
    loader = given.get("loader") or given["cpu_loader"]
    device = given.get("device") or given.get("devices")
    if isinstance(device, ast.List | ast.Tuple) and len(device.elts) == 1:
        device = device.elts[0]
    if device is None or isinstance(device, ast.List | ast.Tuple):
        return False
    loops = None if last_part(call.func) == "ParallelLoader" else _loops(edits, call)
    if (
        loops
        and isinstance(device, ast.Name)
        and all(_moves(edits, loop, device) is not None for loop in loops)
    ):
        for loop in loops:
            _move_in(edits, loop, device)
        return edits.fill(call, "{0}", [loader], "the loop moves each batch to the device")
    requests = _requests(edits, call)
    helper = edits.helper("OnDevice")
    if not edits.fill(call, f"{helper}({{0}}, {{1}})", [loader, device]):
        return False
    for request in requests:
        _drop_request(edits, request)
    return True


def _loops(edits: Edits, call: ast.Call) -> list[ast.For] | None:
    """The loops over a loader; None if it is used for anything else, except its length."""
    parent = edits.names.parents[call]
    if (loop := _loop(edits, call)) is not None:
        return [loop]
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
        return None
    target = parent.targets[0]
    if not isinstance(target, ast.Name) or len(edits.names.bindings(target)) != 1:
        return None
    loops = []
    for use in edits.names.references(target.id, edits.names.scope(target)):
        around = edits.names.parents[use]
        if isinstance(around, ast.Call) and last_part(around.func) == "len":
            continue
        if (loop := _loop(edits, use)) is None:
            return None
        loops.append(loop)
    return loops


def _loop(edits: Edits, node: ast.AST) -> ast.For | None:
    """The loop in whose head an expression is, perhaps in `enumerate` or a progress bar."""
    parents = edits.names.parents
    while isinstance(around := parents[node], ast.Call) and last_part(around.func) in AROUND:
        if around.args[:1] != [node]:
            return None
        node = around
    return around if isinstance(around, ast.For) and around.iter is node else None


def _batch(loop: ast.For) -> ast.expr:
    """The target of a loop that is the batch, without the number that `enumerate` gives."""
    numbered = isinstance(loop.iter, ast.Call) and any(
        isinstance(part, ast.Call) and last_part(part.func) == "enumerate"
        for part in ast.walk(loop.iter)
    )
    if numbered and isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2:
        return loop.target.elts[1]
    return loop.target if not numbered else ast.Tuple([])


def _moves(edits: Edits, loop: ast.For, device: ast.Name) -> str | None:
    """The line that moves a batch; None if the target is nested, or shares a line with the body."""
    batch = _batch(loop)
    if loop.body[0].lineno == loop.iter.end_lineno or _rebinds(edits, loop, device):
        return None
    if isinstance(batch, ast.Name):
        if _is_dict(loop, batch.id):
            parts = f"{{key: value.to({device.id}) for key, value in {batch.id}.items()}}"
            return f"{batch.id} = {parts}"
        return f"{batch.id} = to_device({batch.id}, {device.id})"
    if not isinstance(batch, ast.Tuple) or not batch.elts or len(batch.elts) > LONGEST:
        return None
    names = [part.id for part in batch.elts if isinstance(part, ast.Name)]
    if len(names) < len(batch.elts):
        return None
    names = [name for name in names if name != "_"]
    return f"{', '.join(names)} = {', '.join(f'{n}.to({device.id})' for n in names)}"


def _rebinds(edits: Edits, loop: ast.For, device: ast.Name) -> bool:
    """Whether the device has another meaning in the loop than where the loader was made."""
    scope = edits.names.scope(device)
    inner = edits.names.scopes.scopes.get(loop)
    home = scope.find(device.id) if scope else None
    return inner is None or inner.find(device.id) is not home


def _is_dict(loop: ast.For, name: str) -> bool:
    for node in (part for statement in loop.body for part in ast.walk(statement)):
        if isinstance(node, ast.keyword) and node.arg is None:
            node = node.value
            if isinstance(node, ast.Name) and node.id == name:
                return True
        if isinstance(node, ast.Subscript) and isinstance(literal(node.slice), str):
            node = node.value
            if isinstance(node, ast.Name) and node.id == name:
                return True
    return False


def _move_in(edits: Edits, loop: ast.For, device: ast.Name) -> None:
    line = _moves(edits, loop, device)
    cell = edits.names.cell_of(loop)
    first = edits.names.line(loop.body[0])
    assert line is not None
    if "to_device(" in line:
        line = line.replace("to_device(", f"{edits.helper('to_device')}(")
    cell.insert_above(first, line)
    cell.note(line_of(loop), f"added below it: {line}")


def _requests(edits: Edits, call: ast.Call) -> list[ast.Call]:
    """The calls of `per_device_loader` of a ParallelLoader, also by its name."""
    objects: list[ast.AST] = [call]
    parent = edits.names.parents[call]
    if isinstance(parent, ast.Assign) and isinstance(target := parent.targets[0], ast.Name):
        objects += edits.names.references(target.id, edits.names.scope(target))
    found = []
    for node in objects:
        attribute = edits.names.parents[node]
        around = edits.names.parents.get(attribute)
        if not isinstance(attribute, ast.Attribute) or attribute.attr != "per_device_loader":
            continue
        if isinstance(around, ast.Call) and around.func is attribute:
            found.append(around)
    return found


def _drop_request(edits: Edits, request: ast.Call) -> None:
    """`x.per_device_loader(device)` → `x`, or `iter(x)` for `next`."""
    if request in edits.done:
        return
    edits.done.add(request)
    cell = edits.names.cell_of(request)
    assert isinstance(request.func, ast.Attribute)
    start, end = cell.span(request.func.value)[0], cell.bare_span(request)[1]
    around = edits.names.parents[request]
    wrap = isinstance(around, ast.Call) and last_part(around.func) == "next"
    if wrap:
        cell.insert(start, "iter(")
    cell.replace(cell.span(request.func.value)[1], end, ")" if wrap else "")
    edits.done |= {part for one in arguments(request) for part in ast.walk(one.value)}
