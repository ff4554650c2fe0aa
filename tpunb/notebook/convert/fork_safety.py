"""Static check of the prelude for calls after which ranks must not be forked.

Forking fails after these calls, measured with torch 2.9: a backward pass starts threads of the
autograd engine, which a child process does not have, and XLA's runtime does not survive a fork.
Threads of libraries are found after the prelude has run (tpunb/worker/fork_safety.py).
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from tpunb.notebook.convert import statements
from tpunb.notebook.convert.statements import ImportedNames
from tpunb.notebook.models import Script

DEVICES = {
    "torch_xla.device",
    "torch_xla.devices",
    "torch_xla.core.xla_model.xla_device",
    "torch_xla.core.xla_model.get_xla_supported_devices",
    "torch_xla.runtime.global_runtime_device_count",
    "torch_xla.runtime.addressable_runtime_device_count",
    "torch_xla.runtime.addressable_device_count",
    "torch_xla.runtime.global_device_count",
    "torch_xla.distributed.spmd.get_1d_mesh",
}
"""Calls that start XLA's runtime (torch_xla 1.0 to 2.9)."""

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
    blocks = [prelude_blocks[index] for index in sorted(read)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warned about the cells when they ran
        trees = [ast.parse(read[index]) for index in sorted(read)]
    prelude = _Prelude(trees)
    for block, tree in zip(blocks, trees, strict=True):
        for node in prelude.executed(tree):
            reason = prelude.finding(node)
            if reason is not None:
                return f"cell [{block.number}] {reason}"
    return None


def _worth_reading(texts: list[str]) -> dict[int, str]:
    """Return the relevant cells by index, because parsing is the slowest part.

    A cell is relevant if it contains one of the searched words, or a name that another relevant
    cell defines or imports.
    """
    words = [set(re.findall(r"\w+", text)) for text in texts]
    worth: dict[int, str] = {}
    names = set(WORDS)
    while new := {
        index: text
        for index, text in enumerate(texts)
        if index not in worth and (words[index] & names or "xla" in text)
    }:
        worth |= new
        for text in new.values():
            for line in re.findall(r"^.*\b(?:import|def)\b.*$", text, re.MULTILINE):
                names.update(re.findall(r"\w+", line))
        names -= {"import", "from", "as", "def"}
    return worth


class _Prelude:
    """Imports and functions of the prelude."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self.imports = ImportedNames(trees)
        self.functions: dict[tuple[str, bool], list[statements.Function]] = {}
        """By name and whether it is a method: `model.fit()` does not call a function `fit`."""
        for tree in trees:
            self._define(tree, is_method=False)

    def _define(self, node: ast.AST, *, is_method: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = is_method
            if isinstance(child, statements.Function):
                self.functions.setdefault((child.name, is_method), []).append(child)
                inside = False
            elif isinstance(child, ast.ClassDef):
                inside = True
            self._define(child, is_method=inside)

    def executed(self, tree: ast.Module) -> Iterator[ast.AST]:
        """Yield the nodes that run in a cell, including bodies of called prelude functions."""
        entered: set[tuple[str, bool]] = set()
        todo: list[ast.AST] = [tree]
        while todo:
            for node in statements.executed(todo.pop(0)):
                yield node
                if not isinstance(node, ast.Call):
                    continue
                called = (_last(node.func), isinstance(node.func, ast.Attribute))
                if called in self.functions and called not in entered:
                    entered.add(called)
                    for function in self.functions[called]:
                        todo.append(ast.Module(body=function.body, type_ignores=[]))

    def finding(self, node: ast.AST) -> str | None:
        """Describe what a node does that forbids a fork; None if nothing."""
        if not isinstance(node, ast.Call):
            return None
        name = self.imports.dotted(node.func)
        if _last(node.func) == "backward":
            return "calls backward()"
        if name == "torch.autograd.grad":
            return "calls torch.autograd.grad()"
        if name in DEVICES or _to_xla(node):
            return "uses an XLA device"
        return None


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _to_xla(call: ast.Call) -> bool:
    """True for `.to("xla")`, or for `device="xla:0"` in any call."""
    values = [word.value for word in call.keywords if word.arg == "device"]
    if _last(call.func) == "to":
        values += call.args[:1]
    return any(
        isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and value.value.partition(":")[0] == "xla"
        for value in values
    )
