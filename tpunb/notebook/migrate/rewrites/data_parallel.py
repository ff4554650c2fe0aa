"""Rewrites `data_parallel.DataParallel` of 2019, whose threads drive all devices of a process.

The code that uses it becomes a function for `torch_xla.launch`, in which a local function replaces
DataParallel. This is only done if no code outside depends on the names involved.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell, last_line_of, line_of
from tpunb.notebook.migrate.imports import NotebookImports
from tpunb.notebook.migrate.names import arguments
from tpunb.notebook.migrate.report import MARK
from tpunb.notebook.migrate.rewrites.calls import DEVICES
from tpunb.notebook.scopes import XM

GONE = "Each rank has its own device, `torch_xla.device()`."
MOVED = "Created in the function for `torch_xla.launch`, once on each rank."
NOTE = "DataParallel → torch_xla.launch: each rank runs the loop on its share of the batches"

HEAD = """\
def _mp_fn(index):
    {mark}Each of the {world}() ranks has a model and takes its share of the batches.
    import itertools
    device_ = {device}()
    model_ = {model}
    model_ = (model_ if isinstance(model_, {module}) else model_()).to(device_)
    {broadcast}(model_)
    context_ = {context}(device_)

    def {name}(loop_fn, loader):
        world = {world}()
        share = itertools.islice(loader, {rank}(), len(loader) // world * world, world)
        result = loop_fn(model_, {loader}(share, device_), device_, context_)
        return {reduce}(loop_fn.__name__, result, list)

"""
TAIL = "{launch}(_mp_fn, start_method='fork')"


@dataclass
class DataParallelUse:
    """A DataParallel object and the statements that use it."""

    name: str
    made: ast.stmt
    func: ast.expr
    model: ast.expr
    devices: ast.Name | None
    cell: CodeCell
    body: list[ast.stmt]
    """Consecutive statements of one cell, which become a function."""


class DataParallelRewriter:
    """Rewrites a DataParallel if all its uses are visible; `CallRewriter` marks the others."""

    def __init__(self, imports: NotebookImports) -> None:
        self.imports = imports
        self.names = imports.names
        self.removals = imports.removals
        self.globals = self.names.scopes.globals
        self.handled: set[ast.AST] = set()
        """The uses of the class that were rewritten."""

    def apply(self) -> None:
        """Make the edits, for only one object per notebook: the function's name must be unique."""
        for _, node in self.names.walk():
            if isinstance(node, ast.Call) and not self.handled:
                use = self.names.use(node.func)
                if use is not None and use.certain and use.row.old.endswith(".DataParallel"):
                    replica = self._replica(node)
                    if replica and self._is_closed(replica) and self._devices(replica):
                        self._rewrite(replica)

    def _replica(self, call: ast.Call) -> DataParallelUse | None:
        made = self.names.parents[call]
        if (
            not isinstance(made, ast.Assign)
            or not isinstance(self.names.parents[made], ast.Module)
            or not self.names.is_alone(made)
            or len(made.targets) != 1
            or not isinstance(target := made.targets[0], ast.Name)
            or self.imports.is_taken("_mp_fn", "")
        ):
            return None
        given = {one.name or index: one.value for index, one in enumerate(arguments(call))}
        model = given.pop("network", given.pop(0, None))
        devices = given.pop("device_ids", given.pop(1, None))
        uses = self.names.references(target.id, self.globals)
        if (
            model is None
            or given
            or not isinstance(devices, ast.Name | None)
            or len(self.globals.bindings[target.id]) != 1
            or not uses
            or not all(map(self._is_driven, uses))
        ):
            return None
        cell = self.names.cell_of(uses[0])
        body = self._body(cell, made, uses)
        return DataParallelUse(target.id, made, call.func, model, devices, cell, body)

    def _is_driven(self, node: ast.expr) -> bool:
        """`replica(loop, loader)` outside of functions."""
        call = self.names.parents[node]
        return (
            isinstance(call, ast.Call)
            and call.func is node
            and len(call.args) == 2
            and not any(argument.name or argument.star for argument in arguments(call))
            and self.names.scope(node) is self.globals
        )

    def _body(self, cell: CodeCell, made: ast.stmt, uses: list[ast.expr]) -> list[ast.stmt]:
        """The statements of a cell from the first to the last one that uses the object.

        Empty if they cannot become a function.
        """
        if any(self.names.cell_of(node) is not cell for node in uses):
            return []
        tops = cell.tree.body
        places = [tops.index(self.names.top(node)) for node in uses]
        first = tops.index(made) + 1 if made in tops else min(places)
        end = max(places) + 1
        # `accuracy = 0` above the loop is moved as well.
        top = first
        while (grown := self._first(tops, top, end)) < top:
            top = grown
        body = tops[top:end]
        lines = range(line_of(body[0]), last_line_of(body[-1]) + 1)
        if (
            (made in tops and top < first)
            or any(line in cell.specials for line in lines)
            or self.names.same_line(body[0])[0] is not body[0]
            or self.names.same_line(body[-1])[-1] is not body[-1]
        ):
            return []
        return body

    def _bound(self, body: list[ast.stmt]) -> set[str]:
        """The global names that statements bind."""
        inside = _nodes(body)
        return {
            name
            for name, bindings in self.globals.bindings.items()
            if any(binding.node in inside for binding in bindings)
        }

    def _first(self, tops: list[ast.stmt], first: int, end: int) -> int:
        """The index of the first statement that binds a name which the range binds as well."""
        homes = [
            self.names.top(binding.node)
            for name in self._bound(tops[first:end])
            for binding in self.globals.bindings[name]
        ]
        return min([first, *(tops.index(home) for home in homes if home in tops)])

    def _is_closed(self, replica: DataParallelUse) -> bool:
        """Whether no name that the statements bind is bound or read outside them."""
        inside = _nodes(replica.body)
        for node in inside:
            if isinstance(node, ast.Global | ast.Import | ast.ImportFrom):
                return False
            if isinstance(node, ast.Constant | ast.JoinedStr) and "\n" in replica.cell.code(node):
                return False  # the lines of a string would be indented
        for name in self._bound(replica.body):
            bound = [binding.node for binding in self.globals.bindings[name]]
            if not inside.issuperset([*bound, *self.names.references(name, self.globals)]):
                return False
        return bool(replica.body)

    def _devices(self, replica: DataParallelUse) -> bool:
        """Whether the list of devices is only used for DataParallel and its length."""
        if replica.devices is None:
            return True
        bindings = self.names.bindings(replica.devices)
        if len(bindings) != 1 or bindings[0].full is not None:
            return False
        made = self.names.statement(bindings[0].node)
        called = [node.func for node in ast.walk(made) if isinstance(node, ast.Call)]
        current = set[str]().union(*map(self.names.current_names, called))
        lengths = [
            self.names.parents[node]
            for node in self.names.references(replica.devices.id, self.globals)
            if node is not replica.devices
        ]
        if (
            DEVICES not in current
            or hasattr(made, "body")
            or not all(getattr(getattr(node, "func", None), "id", "") == "len" for node in lengths)
        ):
            return False
        self.removals.add(made, GONE)
        world = self.imports.spelled(f"{removed_apis.XR}.world_size", replica.func)
        for length in lengths:
            self.names.cell_of(length).replace_node(length, f"{world}()")
        return True

    def _rewrite(self, replica: DataParallelUse) -> None:
        cell = replica.cell
        self.handled.add(replica.func)

        def name(full: str) -> str:
            return self.imports.spelled(full, replica.func)

        head = HEAD.format(
            mark=MARK,
            name=replica.name,
            model=self.names.cell_of(replica.model).code(replica.model),
            module=name("torch.nn") + ".Module",
            device=name("torch_xla.device"),
            broadcast=name(f"{XM}.broadcast_master_param"),
            context=name(f"{removed_apis.DP}.Context"),
            world=name(f"{removed_apis.XR}.world_size"),
            rank=name(f"{removed_apis.XR}.global_ordinal"),
            loader=name(f"{removed_apis.PL}.MpDeviceLoader"),
            reduce=name(f"{XM}.mesh_reduce"),
        )
        self.removals.add(replica.made, MOVED)
        first, last = self.names.line(replica.body[0]), last_line_of(replica.body[-1])
        cell.insert_text(first, head)
        cell.indent_lines(first, last)
        cell.insert_below(last, TAIL.format(launch=name("torch_xla.launch")), "")
        cell.note(first, NOTE)


def _nodes(body: list[ast.stmt]) -> set[ast.AST]:
    return {node for statement in body for node in ast.walk(statement)}
