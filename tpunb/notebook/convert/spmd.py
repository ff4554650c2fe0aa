"""Determine whether a notebook certainly uses torch_xla's SPMD mode: one process, all cores.

The answer decides how a run is started, so only code that certainly runs counts: statements of the
cells and of the functions that they call by name or launch, but not code in a branch, a handler or
below a `return`. Uses that this check misses are reported when they run.
"""

from __future__ import annotations

import ast
import re

from tpunb.backends.xla import spmd
from tpunb.notebook.convert.names import RunCells
from tpunb.notebook.scopes import Scopes, Site, argument, literal, mentions

_WORD = re.compile(r"spmd|xla_sharding|fsdp_v2|distribute_(?:tensor|module)", re.IGNORECASE)
"""Every notebook that uses the mode has a function or module name that contains one of these."""

SWITCHES = {
    "torch_xla.runtime.use_spmd": "use_spmd()",
    "optimum.tpu.fsdp_v2.use_fsdp_v2": "use_fsdp_v2()",
    "optimum.tpu.use_fsdp_v2": "use_fsdp_v2()",
}
"""Calls that switch the mode on."""
_SPMD = "torch_xla.distributed.spmd"
_MODULES = (_SPMD, f"{_SPMD}.xla_sharding", "torch_xla.experimental.xla_sharding")
_FSDP = "torch_xla.experimental.spmd_fully_sharded_data_parallel"
NEEDS = {
    **{f"{module}.mark_sharding": "mark_sharding()" for module in _MODULES},
    f"{_FSDP}.SpmdFullyShardedDataParallel": "FSDPv2",
}
"""Calls that raise if the mode is off (torch_xla 2.9: 'Please enable SPMD via …')."""
DTENSOR = {
    f"torch.distributed.{module}.{name}"
    for module in ("tensor", "_tensor")
    for name in ("distribute_tensor", "distribute_module")
}
"""Calls that torch passes to torch_xla on a mesh of 'xla', which switches the mode on (2.9)."""
_MESHES = {
    f"torch.distributed.{name}"
    for module in ("", "device_mesh.", "tensor.", "_tensor.")
    for name in (f"{module}init_device_mesh", f"{module}DeviceMesh")
}


def spmd_reason(run: RunCells) -> str | None:
    """Return why the run uses SPMD, 'cell [3] calls use_spmd()'; None if nothing shows it.

    A call that switches the mode on takes precedence over
    a call that only works in it.
    """
    if not any(mentions(_WORD, source) for source in run.sources):
        return None
    scopes = run.scopes
    needs = None
    has_mesh = False
    for cell in scopes.cells:
        for site in scopes.executed(cell, certain=True, launches=True):
            node = site.node
            if what := _switch(scopes, site):
                return f"cell [{cell.number}] {what}"
            if needs is not None or not isinstance(node, ast.Call):
                continue
            name = scopes.full(node.func, site.scope)
            has_mesh = has_mesh or (
                name in _MESHES and literal(argument(node, "device_type", 0)) == "xla"
            )
            if name in NEEDS:
                needs = f"cell [{cell.number}] uses {NEEDS[name]}, which works in that mode only"
            elif name in DTENSOR and has_mesh:
                what = name.rpartition(".")[2]
                needs = f"cell [{cell.number}] calls {what}() for a mesh of 'xla'"
    return needs


def _switch(scopes: Scopes, site: Site) -> str | None:
    """Describe how a node switches the mode on; None if it does not."""
    node = site.node
    if isinstance(node, ast.Call):
        name = scopes.full_or_written(node.func, site.scope)
        if name in SWITCHES:
            return f"calls {SWITCHES[name]}"
    for variable, value in scopes.variables_set(site):
        flag = literal(value)
        if literal(variable) == spmd.VARIABLE and isinstance(flag, str) and spmd.parse_flag(flag):
            return f"sets {spmd.VARIABLE}"
    return None
