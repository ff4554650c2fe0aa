"""Whether a notebook surely uses torch_xla's SPMD mode, in which one process drives all cores.

That decides how a run is started, so only what surely runs counts: statements of the cells and
of the functions that they call by name or launch, but not what stands in a branch, a handler or
below a `return`. What is not seen here says so when it runs.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence

from tpunb.notebook.convert import statements
from tpunb.notebook.convert.names import Piece
from tpunb.notebook.convert.statements import Function, ImportedNames
from tpunb.xla import spmd

_WORD = re.compile(r"spmd|xla_sharding|fsdp_v2|distribute_(?:tensor|module)", re.IGNORECASE)
"""Every notebook that uses the mode has one of these in the name of a function or module."""

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
"""Calls that raise where the mode is off (torch_xla 2.9: 'Please enable SPMD via …')."""
DTENSOR = {
    f"torch.distributed.{module}.{name}"
    for module in ("tensor", "_tensor")
    for name in ("distribute_tensor", "distribute_module")
}
"""On a mesh of 'xla' torch passes these to torch_xla, which switches the mode on (torch 2.9)."""
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


def spmd_reason(cells: Sequence[Piece]) -> str | None:
    """Why the run uses SPMD, 'cell [3] calls use_spmd()'; None if nothing in it shows that.

    `cells` are those of the run, in order. A call that switches the mode on is named before
    one that only works in it.
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
        for node in run.surely(tree):
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

    def surely(self, tree: ast.Module) -> Iterator[ast.AST]:
        """What runs when a cell runs, with the functions that it calls or launches."""
        entered: set[int] = set()
        todo = [tree.body]
        while todo:
            for node in _surely(todo.pop(0)):
                yield node
                for function in self._called(node) if isinstance(node, ast.Call) else ():
                    if id(function) not in entered:
                        entered.add(id(function))
                        todo.append(function.body)

    def _called(self, call: ast.Call) -> Iterator[Function]:
        """The notebook's own functions that a call runs, where names tell."""
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
        """What a node does that switches the mode on, in words."""
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


def _surely(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes that run if a body runs, up to what may leave it."""
    for statement in body:
        yield from _of(statement)
        if _may_leave(statement):
            return


def _may_leave(statement: ast.stmt) -> bool:
    """By `return`, or inside a loop by `break`; by `raise` the run fails anyway."""
    ways: tuple[type[ast.stmt], ...] = (ast.Return,)
    if not isinstance(statement, ast.For | ast.AsyncFor | ast.While):
        ways += (ast.Break, ast.Continue)
    return isinstance(statement, ways) or (
        not isinstance(statement, (Function, ast.ClassDef))
        and any(isinstance(node, ways) for node in statements.executed(statement))
    )


def _of(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what surely runs with it."""
    yield node
    for part in _parts(node):
        if isinstance(part, ast.AST):
            yield from _of(part)
        else:
            yield from _surely(part)


def _parts(node: ast.AST) -> Sequence[ast.AST | list[ast.stmt]]:
    if isinstance(node, Function):
        return [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords, node.body]
    if isinstance(node, ast.Lambda):
        return []
    if isinstance(node, ast.If):
        return [node.test, *([node.body] if _is_main(node.test) else [])]
    if isinstance(node, ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values[:1]
    if isinstance(node, ast.For | ast.AsyncFor):
        return [node.iter, node.body]
    if isinstance(node, ast.With | ast.AsyncWith):
        return [*node.items, node.body]
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return [node.generators[0].iter]
    if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":  # new in Python 3.11
        return [node.body, node.finalbody]  # type: ignore[attr-defined]
    return list(ast.iter_child_nodes(node))


def _is_main(test: ast.expr) -> bool:
    return ast.unparse(test) == "__name__ == '__main__'"
