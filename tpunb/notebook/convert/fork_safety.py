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
from tpunb.notebook.scopes import DEVICES, Scopes, Site, last_part, literal, words

WORDS = {"backward", "autograd"}
"""Every cell in which the check finds something contains one of these words, or 'xla'."""


def static_reason(script: Script) -> str | None:
    """Return why every rank must run the prelude itself, in one line; None if nothing is found.

    Checks the code that runs with the prelude: module-level statements, and the functions and
    methods of the prelude that they call by name, directly or through each other. Anything
    missed is found at run time.
    """
    prelude_blocks = [block for block in script.blocks if block.role == "prelude"]
    read = _worth_reading([script.source(block) for block in prelude_blocks])
    blocks = ((prelude_blocks[index], read[index]) for index in sorted(read))
    cells = [RunCell(block.number or 0, text, block.cell or 0) for block, text in blocks]
    prelude = RunCells(cells).scopes
    for cell in prelude.cells:
        for site in prelude.executed(cell):
            reason = _finding(prelude, site)
            if reason is not None:
                return f"cell [{cell.number}] {reason}"
    return None


def _worth_reading(texts: list[str]) -> dict[int, str]:
    """Return the relevant cells by index, because parsing is the slowest part.

    A cell is relevant if it contains one of the searched words, or a name that another relevant
    cell defines or imports.
    """
    own = [words(text).keys() for text in texts]
    worth: dict[int, str] = {}
    names = set(WORDS)
    while new := {
        index: text
        for index, text in enumerate(texts)
        if index not in worth and (own[index] & names or "xla" in text)
    }:
        worth |= new
        for text in new.values():
            for line in re.findall(r"^.*\b(?:import|def)\b.*$", text, re.MULTILINE):
                names.update(words(line))
        names -= {"import", "from", "as", "def"}
    return worth


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
