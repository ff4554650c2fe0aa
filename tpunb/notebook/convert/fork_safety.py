"""Static check of the prelude for calls after which ranks must not be forked.

Forking fails after these calls, measured with torch 2.9: a backward pass starts threads of the
autograd engine, which a child process does not have, and XLA's runtime does not survive a fork.
Threads of libraries are found after the prelude has run (tpunb/worker/fork_safety.py).
"""

from __future__ import annotations

import ast
import re

from tpunb.notebook.convert.names import RunCell, RunCells
from tpunb.notebook.models import Script
from tpunb.notebook.scopes import DEVICES, Scopes, Site, last_part, literal, mentions

_WORDS = re.compile("backward|autograd|xla")
"""A prelude in which the check finds something contains one of these words."""


def static_reason(script: Script) -> str | None:
    """Return why every rank must run the prelude itself, in one line; None if nothing is found.

    Checks the code that runs with the prelude: module-level statements, and the functions and
    methods of the prelude that they call by name, directly or through each other. Anything
    missed is found at run time.
    """
    run = RunCells(
        [
            RunCell(block.number or 0, script.source(block).removesuffix("\n"), block.cell or 0)
            for block in script.blocks
            if block.role == "prelude"
        ]
    )
    if not any(mentions(_WORDS, source) for source in run.sources):
        return None
    prelude = run.scopes
    for cell in prelude.cells:
        for site in prelude.executed(cell):
            reason = _finding(prelude, site)
            if reason is not None:
                return f"cell [{cell.number}] {reason}"
    return None


def _finding(prelude: Scopes, site: Site) -> str | None:
    """Describe what a node does that forbids a fork; None if nothing."""
    node = site.node
    if not isinstance(node, ast.Call):
        return None
    name = prelude.full_or_written(node.func, site.scope)
    if last_part(node.func) == "backward":
        return "calls backward()"
    if name == "torch.autograd.grad":
        return "calls torch.autograd.grad()"
    if name in DEVICES or _to_xla(node):
        return "uses an XLA device"
    return None


def _to_xla(call: ast.Call) -> bool:
    """True for `.to("xla")`, or for `device="xla:0"` in any call."""
    values = [word.value for word in call.keywords if word.arg == "device"]
    if last_part(call.func) == "to":
        values += call.args[:1]
    return any(str(literal(value)).partition(":")[0] == "xla" for value in values)
