"""Puts DistributedDataParallel around a model whose uses are all known to work with it."""

from __future__ import annotations

import ast

from tpunb.notebook.migrate.cell import last_line_of
from tpunb.notebook.migrate.torchtpu.edits import Edits
from tpunb.notebook.scopes import Binding, Function, Scope, last_part

SAME = {"train", "eval", "parameters", "named_parameters", "zero_grad"}
"""Attributes that DistributedDataParallel has too, with the same effect."""
WRAPPED = "DDP({}, broadcast_buffers=False)"
"""Without broadcasts in forward, ranks may evaluate different numbers of batches, as in XLA."""

CLIPS = {"clip_grad_norm_", "clip_grad_value_"}
CLIPPED = ". Clipping now sees the averaged gradients, no longer those of each rank"


def wrap_in_ddp(edits: Edits, step: ast.Call, optimizer: ast.expr) -> bool:
    """Wrap the model that an optimizer trains; False if its gradients need to be averaged.

    The model and the optimizer must be local to a function, have one value, one `backward` and one
    step; the model is only called or used by attributes that stay the same.
    """
    model = _model(edits, optimizer)
    if model is None or edits.ddp or not _is_alone(edits):
        return False
    binding, scope = model
    statement = edits.names.statement(binding.node)
    uses = edits.names.references(binding.name, scope)
    own = set(ast.walk(statement))
    others = [use for use in uses if use not in own]
    if edits.is_taken("DDP") or not all(_works(edits, use) for use in others):
        return False
    for use in others:
        attribute = edits.names.parents[use]
        if isinstance(attribute, ast.Attribute) and attribute.attr == "state_dict":
            edits.names.cell_of(use).insert(edits.names.cell_of(use).bare_span(use)[1], ".module")
    cell, line = edits.names.cell_of(statement), last_line_of(statement)
    text = f"{binding.name} = {WRAPPED.format(binding.name)}"
    cell.insert_below(line, text, cell.indent(edits.names.line(statement)))
    clips = any(last_part(site.call.func) in CLIPS for site in edits.names.scopes.calls)
    cell.note(line, f"added below it: {text}" + (CLIPPED if clips else ""))
    edits.ddp = True
    edits.module("dist")
    return True


def _model(edits: Edits, optimizer: ast.expr) -> tuple[Binding, Scope] | None:
    """The binding of the model whose parameters an optimizer has, by `optimizer`'s name."""
    made = _only_value(edits, optimizer)
    if made is None or not made[2].args:
        return None
    parameters = made[2].args[0]
    if not isinstance(parameters, ast.Call) or last_part(parameters.func) != "parameters":
        return None
    assert isinstance(parameters.func, ast.Attribute | ast.Name)
    name = parameters.func.value if isinstance(parameters.func, ast.Attribute) else None
    value = _only_value(edits, name)
    if value is None or value[1] is not made[1]:
        return None
    binding, scope, call = value
    moved = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
    statement = edits.names.statement(binding.node)
    return (binding, scope) if moved and edits.names.is_alone(statement) else None


def _only_value(edits: Edits, node: ast.expr | None) -> tuple[Binding, Scope, ast.Call] | None:
    """The only value of a local name of a function, if a call makes it."""
    if not isinstance(node, ast.Name) or (scope := edits.names.scope(node)) is None:
        return None
    home = scope.find(node.id)
    bindings = edits.names.bindings(node)
    if home is None or not isinstance(home.node, Function) or len(bindings) != 1:
        return None
    assign = edits.names.parents.get(bindings[0].node)
    if not isinstance(assign, ast.Assign) or not isinstance(assign.value, ast.Call):
        return None
    if assign.targets != [bindings[0].node]:
        return None
    return bindings[0], home, assign.value


def _is_alone(edits: Edits) -> bool:
    """Whether the program has one `backward` and one `optimizer_step`, and only these use it."""
    called = [last_part(site.call.func) for site in edits.names.scopes.calls]
    return called.count("backward") == 1 and called.count("optimizer_step") == 1


def _works(edits: Edits, use: ast.expr) -> bool:
    parent = edits.names.parents[use]
    if isinstance(parent, ast.Attribute):
        return parent.attr in SAME or parent.attr == "state_dict"
    if not isinstance(parent, ast.Call):
        return False
    name = last_part(parent.func)
    return parent.func is use or name == "broadcast_master_param"
