"""Rewrites `data_parallel.DataParallel` of 2019, whose threads drive all devices of a process.

The code that uses it becomes a function for `torch_xla.launch`, in which a local function replaces
DataParallel. This is only done if no code outside depends on the names involved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import libcst as cst
from libcst.metadata import Assignment, GlobalScope, Scope

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.migrate.names import nodes_of, references
from tpunb.notebook.migrate.report import MARK
from tpunb.notebook.migrate.rewrites.base import Rewriter

DEVICES = f"{removed_apis.XM}.get_xla_supported_devices"
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
    made: cst.SimpleStatementLine
    call: cst.Call
    model: cst.BaseExpression
    cell: CodeCell
    body: list[cst.CSTNode]
    """Consecutive statements of one cell, which become a function."""
    devices: cst.Name | None


class DataParallelRewriter(Rewriter):
    """Rewrites a DataParallel if all its uses are visible; `CallRewriter` marks the others."""

    def apply(self) -> None:
        """Make the edits, for only one object per notebook: the function's name must be unique."""
        for cell, node in self.names.walk():
            if isinstance(node, cst.Call) and not self._handled:
                use = self.names.use(cell, node.func)
                if use is not None and use.certain and use.row.old.endswith(".DataParallel"):
                    replica = self._replica(cell, node)
                    if replica is not None:
                        self._rewrite(replica)

    def _replica(self, cell: CodeCell, call: cst.Call) -> DataParallelUse | None:
        assign = self.names.parents[call]
        line = self.names.parents[assign]
        if (
            not isinstance(assign, cst.Assign)
            or not isinstance(line, cst.SimpleStatementLine)
            or len(line.body) > 1
            or self.imports.is_taken("_mp_fn", "")
            or len(assign.targets) != 1
            or not isinstance(assign.targets[0].target, cst.Name)
            or not isinstance(self.names.parents[line], cst.Module)
        ):
            return None
        given = {
            arg.keyword.value if arg.keyword else index: arg for index, arg in enumerate(call.args)
        }
        model = given.pop("network", given.pop(0, None))
        devices = given.pop("device_ids", given.pop(1, None))
        if model is None or given or (devices and not isinstance(devices.value, cst.Name)):
            return None
        name = assign.targets[0].target.value
        scope = cast("Scope", self.names.scopes[assign.targets[0].target])
        uses = set(references(scope, name))
        if len(list(scope[name])) != 1 or not uses or not all(map(self._is_driven, uses)):
            return None
        body = self._body(line, uses)
        replica = DataParallelUse(
            name,
            line,
            call,
            model.value,
            self.names.cell_of(next(iter(uses))),
            body,
            cast("cst.Name", devices.value) if devices else None,
        )
        return (
            replica
            if body and self._is_closed(replica, scope) and self._devices(replica, scope)
            else None
        )

    def _is_driven(self, node: cst.CSTNode) -> bool:
        """`replica(loop, loader)` outside of functions."""
        call = self.names.parents[node]
        return (
            isinstance(call, cst.Call)
            and call.func is node
            and len(call.args) == 2
            and not any(arg.keyword or arg.star for arg in call.args)
            and isinstance(self.names.scopes.get(node), GlobalScope)
        )

    def _body(
        self, assignment: cst.SimpleStatementLine, uses: set[cst.CSTNode]
    ) -> list[cst.CSTNode]:
        """The statements from the first to the last one that uses the object."""
        cells = {self.names.cell_of(node).index for node in uses}
        if len(cells) != 1:
            return []
        cell = self.names.cell_of(next(iter(uses)))
        assert cell.module is not None
        tops: list[cst.CSTNode] = list(cell.module.body)
        places = [tops.index(self.names.top(node)) for node in uses]
        first = tops.index(assignment) + 1 if assignment in tops else min(places)
        end = max(places) + 1
        # `accuracy = 0` above the loop is moved as well.
        top = first
        while (grown := self._first(tops, top, end)) < top:
            top = grown
        if assignment in tops and top < first:
            return []
        body = tops[top:end]
        lines = range(cell.line_of(body[0]), cell.positions[body[-1]].end.line)
        if any(line in cell.specials for line in lines):
            return []
        return body

    def _first(self, tops: list[cst.CSTNode], first: int, end: int) -> int:
        """The index of the first statement that binds a name which the range binds as well."""
        inside = {node for top in tops[first:end] for node in nodes_of(top)}
        scope = next(
            entry for entry in self.names.scopes.values() if isinstance(entry, GlobalScope)
        )
        bound = [entry for entry in scope.assignments if isinstance(entry, Assignment)]
        names = {entry.name for entry in bound if entry.node in inside}
        places = [
            tops.index(top)
            for entry in bound
            if entry.name in names and (top := self.names.top(entry.node)) in tops
        ]
        return min([first, *places])

    def _is_closed(self, replica: DataParallelUse, scope: Scope) -> bool:
        """Whether no name that the statements bind is bound or read outside them."""
        inside = {node for top in replica.body for node in nodes_of(top)}
        for node in inside:
            if isinstance(node, (cst.Global, cst.Import, cst.ImportFrom)):
                return False
            if isinstance(
                node, (cst.SimpleString, cst.FormattedString)
            ) and "\n" in replica.cell.code(node):
                return False  # its lines would be indented
        bound = {
            entry.name
            for entry in scope.assignments
            if isinstance(entry, Assignment) and entry.node in inside
        }
        for name in bound:
            if not all(
                isinstance(entry, Assignment) and entry.node in inside for entry in scope[name]
            ):
                return False
            if not set(references(scope, name)) <= inside:
                return False
        return True

    def _devices(self, replica: DataParallelUse, scope: Scope) -> bool:
        """Whether the list of devices is only used for DataParallel and its length."""
        if replica.devices is None:
            return True
        name = replica.devices.value
        assignments = list(scope[name])
        if len(assignments) != 1 or not isinstance(assignments[0], Assignment):
            return False
        statement = self.names.statement(assignments[0].node)
        text = [
            name
            for node in nodes_of(statement)
            if isinstance(node, cst.Call)
            for name in self.names.full_names(node)
        ]
        lengths = [
            self.names.parents[self.names.parents[node]]
            for node in set(references(scope, name))
            if node is not replica.devices
        ]
        current = {
            row.new if row and row.new else length
            for length in text
            if (row := removed_apis.lookup_name(length)) or length
        }
        if DEVICES not in current or not isinstance(statement, cst.SimpleStatementLine):
            return False
        if not all(
            isinstance(length, cst.Call) and getattr(length.func, "value", "") == "len"
            for length in lengths
        ):
            return False
        self.removals.remove(statement.body[0], GONE)
        world = self.imports.spelled(
            f"{removed_apis.XR}.world_size", replica.cell, replica.call.func
        )
        for length in lengths:
            self.names.cell_of(length).replace_node(length, f"{world}()")
        return True

    def _rewrite(self, replica: DataParallelUse) -> None:
        cell, func = replica.cell, replica.call.func
        self._handled.add(func)

        def name(full: str) -> str:
            return self.imports.spelled(full, cell, func)

        head = HEAD.format(
            mark=MARK,
            name=replica.name,
            model=self.names.cell_of(replica.model).code(replica.model),
            module=name("torch.nn") + ".Module",
            device=name("torch_xla.device"),
            broadcast=name(f"{removed_apis.XM}.broadcast_master_param"),
            context=name(f"{removed_apis.DP}.Context"),
            world=name(f"{removed_apis.XR}.world_size"),
            rank=name(f"{removed_apis.XR}.global_ordinal"),
            loader=name(f"{removed_apis.PL}.MpDeviceLoader"),
            reduce=name(f"{removed_apis.XM}.mesh_reduce"),
        )
        self.removals.add(replica.made, MOVED)
        first = self.names.line(replica.body[0])
        end = cell.positions[replica.body[-1]].end
        last = max(first, end.line - 1 if end.column else end.line - 2)
        cell.insert_text(first, head)
        cell.indent_lines(first, last)
        cell.insert_below(last, TAIL.format(launch=name("torch_xla.launch")), "")
        cell.note(first, NOTE)
