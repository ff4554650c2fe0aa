"""`data_parallel.DataParallel`, the way of 2019: threads that drive all devices of a process.

The code that drives it becomes a function for `torch_xla.launch`, in which a local function
takes DataParallel's place. That is done only where nothing outside the code can tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import libcst as cst
from libcst.metadata import Assignment, GlobalScope, Scope

from tpunb import retired
from tpunb.migrate.cells import CodeCell
from tpunb.migrate.changes import MARK
from tpunb.migrate.names import nodes_of, references
from tpunb.migrate.rewriter import Rewriter

DEVICES = f"{retired.XM}.get_xla_supported_devices"
GONE = "Each rank has one device of its own, `torch_xla.device()`."
MOVED = "Made in the function for `torch_xla.launch`, once on each rank."
NOTE = "DataParallel → torch_xla.launch: each rank runs the loop on its share of the batches"

HEAD = """\
def _mp_fn(index):
    {mark}Each rank has a model and takes every {world}-th batch.
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
class Replica:
    """One DataParallel object and the statements that drive it."""

    name: str
    made: cst.SimpleStatementLine
    call: cst.Call
    model: cst.BaseExpression
    cell: CodeCell
    body: list[cst.CSTNode]
    """Statements of one cell, one after the other, that become a function."""
    devices: cst.Name | None


class Replicas(Rewriter):
    """Rewrites what can be rewritten; the others are marked elsewhere."""

    def apply(self) -> None:
        """Make the edits; one per notebook, as its functions need names."""
        for cell, node in self.names.walk():
            if isinstance(node, cst.Call) and not self._handled:
                use = self.names.use(cell, node.func)
                if use is not None and use.certain and use.row.old.endswith(".DataParallel"):
                    found = self._replica(cell, node)
                    if found is not None:
                        self._rewrite(found)

    def _replica(self, cell: CodeCell, call: cst.Call) -> Replica | None:
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
        found = Replica(
            name,
            line,
            call,
            model.value,
            self.names.cell_of(next(iter(uses))),
            body,
            cast("cst.Name", devices.value) if devices else None,
        )
        return (
            found
            if body and self._is_closed(found, scope) and self._devices(found, scope)
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

    def _body(self, made: cst.SimpleStatementLine, uses: set[cst.CSTNode]) -> list[cst.CSTNode]:
        """The statements from the first to the last that has to do with the object."""
        cells = {self.names.cell_of(node).index for node in uses}
        if len(cells) != 1:
            return []
        cell = self.names.cell_of(next(iter(uses)))
        assert cell.module is not None
        tops: list[cst.CSTNode] = list(cell.module.body)
        places = [tops.index(self.names.top(node)) for node in uses]
        first = tops.index(made) + 1 if made in tops else min(places)
        end = max(places) + 1
        # `accuracy = 0` above the loop goes with it.
        top = first
        while (grown := self._first(tops, top, end)) < top:
            top = grown
        if made in tops and top < first:
            return []
        body = tops[top:end]
        lines = range(cell.line_of(body[0]), cell.positions[body[-1]].end.line)
        if any(line in cell.specials for line in lines):
            return []
        return body

    def _first(self, tops: list[cst.CSTNode], first: int, end: int) -> int:
        """The first statement that binds a name which statements of a cell bind as well."""
        inside = {node for top in tops[first:end] for node in nodes_of(top)}
        scope = next(one for one in self.names.scopes.values() if isinstance(one, GlobalScope))
        bound = [one for one in scope.assignments if isinstance(one, Assignment)]
        names = {one.name for one in bound if one.node in inside}
        places = [
            tops.index(top)
            for one in bound
            if one.name in names and (top := self.names.top(one.node)) in tops
        ]
        return min([first, *places])

    def _is_closed(self, found: Replica, scope: Scope) -> bool:
        """Whether the statements bind no name that is bound or read outside of them."""
        inside = {node for top in found.body for node in nodes_of(top)}
        for node in inside:
            if isinstance(node, (cst.Global, cst.Import, cst.ImportFrom)):
                return False
            if isinstance(
                node, (cst.SimpleString, cst.FormattedString)
            ) and "\n" in found.cell.code(node):
                return False  # its lines would be indented
        bound = {
            one.name
            for one in scope.assignments
            if isinstance(one, Assignment) and one.node in inside
        }
        for name in bound:
            if not all(isinstance(one, Assignment) and one.node in inside for one in scope[name]):
                return False
            if not set(references(scope, name)) <= inside:
                return False
        return True

    def _devices(self, found: Replica, scope: Scope) -> bool:
        """Whether the list of devices is used for nothing but DataParallel and its length."""
        if found.devices is None:
            return True
        name = found.devices.value
        made = list(scope[name])
        if len(made) != 1 or not isinstance(made[0], Assignment):
            return False
        statement = self.names.statement(made[0].node)
        text = [
            name
            for node in nodes_of(statement)
            if isinstance(node, cst.Call)
            for name in self.names.called(node)
        ]
        lengths = [
            self.names.parents[self.names.parents[node]]
            for node in set(references(scope, name))
            if node is not found.devices
        ]
        current = {
            row.new if row and row.new else one
            for one in text
            if (row := retired.lookup(one)) or one
        }
        if DEVICES not in current or not isinstance(statement, cst.SimpleStatementLine):
            return False
        if not all(
            isinstance(one, cst.Call) and getattr(one.func, "value", "") == "len" for one in lengths
        ):
            return False
        self.retirements.retire(statement.body[0], GONE)
        world = self.imports.spelled(f"{retired.XR}.world_size", found.cell, found.call.func)
        for one in lengths:
            self.names.cell_of(one).replace_node(one, f"{world}()")
        return True

    def _rewrite(self, found: Replica) -> None:
        cell, func = found.cell, found.call.func
        self._handled.add(func)

        def name(full: str) -> str:
            return self.imports.spelled(full, cell, func)

        head = HEAD.format(
            mark=MARK,
            name=found.name,
            model=self.names.cell_of(found.model).code(found.model),
            module=name("torch.nn") + ".Module",
            device=name("torch_xla.device"),
            broadcast=name(f"{retired.XM}.broadcast_master_param"),
            context=name(f"{retired.DP}.Context"),
            world=name(f"{retired.XR}.world_size"),
            rank=name(f"{retired.XR}.global_ordinal"),
            loader=name(f"{retired.PL}.MpDeviceLoader"),
            reduce=name(f"{retired.XM}.mesh_reduce"),
        )
        self.retirements.add(found.made, MOVED)
        first = self.names.line(found.body[0])
        end = cell.positions[found.body[-1]].end
        last = max(first, end.line - 1 if end.column else end.line - 2)
        cell.insert_text(first, head)
        cell.indent_lines(first, last)
        cell.insert_below(last, TAIL.format(launch=name("torch_xla.launch")), "")
        cell.note(first, NOTE)
