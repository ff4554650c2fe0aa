"""Determine whether a notebook certainly uses torch_xla's SPMD mode: one process, all cores.

The answer decides how a run is started, so only code that certainly runs counts: statements of the
cells and of the functions that they call by name or launch, but not code in a branch, a handler or
below a `return`. Uses that this check misses are reported when they run.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence

from tpunb.notebook.convert import statements
from tpunb.notebook.convert.names import RunCell
from tpunb.notebook.convert.statements import Function, ImportedNames
from tpunb.xla import spmd

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
LAUNCHERS = {
    "torch_xla.launch",
    "torch_xla.distributed.xla_multiprocessing.spawn",
    "accelerate.notebook_launcher",
    "accelerate.launchers.notebook_launcher",
}


def spmd_reason(cells: Sequence[RunCell]) -> str | None:
    """Return why the run uses SPMD, 'cell [3] calls use_spmd()'; None if nothing shows it.

    `cells` are those of the run, in order. A call that switches the mode on takes precedence over
    a call that only works in it.
    """
    if not any(_WORD.search(cell.source) for cell in cells):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warned about the cells when they ran
        trees = [ast.parse(cell.source) for cell in cells]
    run = _Run(trees)
    needs = None
    has_mesh = False
    for cell, tree in zip(cells, trees, strict=True):
        for node in run.certain_nodes(tree):
            if what := run.switch(node):
                return f"cell [{cell.number}] {what}"
            name = run.imports.dotted(node.func) if isinstance(node, ast.Call) else ""
            has_mesh = has_mesh or (name in _MESHES and _first_argument(node) == "xla")
            if needs is not None:
                continue
            if name in NEEDS:
                needs = f"cell [{cell.number}] uses {NEEDS[name]}, which works in that mode only"
            elif name in DTENSOR and has_mesh:
                what = name.rpartition(".")[2]
                needs = f"cell [{cell.number}] calls {what}() for a mesh of 'xla'"
    return needs


class _Run:
    """The cells of a run: their imports, functions and classes."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self.imports = ImportedNames(trees)
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, Function):
                self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node

    def certain_nodes(self, tree: ast.Module) -> Iterator[ast.AST]:
        """Yield nodes that certainly run in a cell and in functions that it calls or launches."""
        entered: set[int] = set()
        todo = [tree.body]
        while todo:
            for node in _certain_nodes(todo.pop(0)):
                yield node
                for function in self._called(node) if isinstance(node, ast.Call) else ():
                    if id(function) not in entered:
                        entered.add(id(function))
                        todo.append(function.body)

    def _called(self, call: ast.Call) -> Iterator[Function]:
        """Yield the notebook's own functions that a call runs, as far as names show it."""
        called: list[ast.expr] = [call.func]
        if self.imports.dotted(call.func) in LAUNCHERS:
            called += [*call.args[:1], *(w.value for w in call.keywords if w.arg in _FUNCTION)]
        for node in called:
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if name in self.functions:
                yield self.functions[name]
            for method in self.classes[name].body if name in self.classes else ():
                if isinstance(method, Function) and method.name in ("__init__", "__post_init__"):
                    yield method

    def switch(self, node: ast.AST) -> str | None:
        """Describe how a node switches the mode on; None if it does not."""
        if isinstance(node, ast.Call):
            name = self.imports.dotted(node.func)
            if name in SWITCHES:
                return f"calls {SWITCHES[name]}"
            if name == "os.environ.setdefault" and [_text(arg) for arg in node.args[:1]] == [
                spmd.VARIABLE
            ]:
                return _sets(node.args[-1])
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if (
                    isinstance(target, ast.Subscript)
                    and self.imports.dotted(target.value) == "os.environ"
                    and _text(target.slice) == spmd.VARIABLE
                ):
                    return _sets(node.value)
        return None


_FUNCTION = ("fn", "function")


def _sets(value: ast.expr) -> str | None:
    return f"sets {spmd.VARIABLE}" if spmd.parse_flag(_text(value)) else None


def _first_argument(call: ast.AST) -> str:
    arguments = (
        [*call.args, *(w.value for w in call.keywords if w.arg == "device_type")]
        if (isinstance(call, ast.Call))
        else []
    )
    return _text(arguments[0]) if arguments else ""


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _certain_nodes(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes that certainly run if a body runs, up to a possible exit."""
    for statement in body:
        yield from _with_children(statement)
        if statements.may_leave(statement, ast.Return):  # `raise` makes the run fail anyway
            return


def _with_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the nodes that certainly run with it."""
    yield node
    for part in _parts(node):
        if isinstance(part, ast.AST):
            yield from _with_children(part)
        else:
            yield from _certain_nodes(part)


def _parts(node: ast.AST) -> Sequence[ast.AST | list[ast.stmt]]:
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords, node.body]
    if isinstance(node, ast.While):
        return [node.test]
    if isinstance(node, ast.For | ast.AsyncFor):
        return [node.iter, node.body]
    if isinstance(node, ast.With | ast.AsyncWith):
        return [*node.items, node.body]
    if isinstance(node, statements.COMPREHENSIONS):
        return [node.generators[0].iter]
    if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":  # new in Python 3.11
        return [node.body, node.finalbody]  # type: ignore[attr-defined]
    return statements.certain_parts(node)
