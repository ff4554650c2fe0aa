"""`ParallelLoader(loader, [device]).per_device_loader(device)` → `MpDeviceLoader(…)`."""

from __future__ import annotations

import libcst as cst

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.migrate.names import references
from tpunb.notebook.migrate.rewrites.base import Rewriter

NEW = "MpDeviceLoader"


class LoaderRewriter(Rewriter):
    """Rewrites a ParallelLoader if all its uses are visible; `CallRewriter` marks the others."""

    def apply(self) -> None:
        """Make the edits."""
        makers = [
            (cell, node)
            for cell, node in self.names.walk()
            if isinstance(node, cst.Call) and self._makes(cell, node)
        ]
        for cell, call in makers:
            if call not in self.removals and call.func not in self._handled:
                self._direct(cell, call) or self._named(cell, call)

    def _makes(self, cell: CodeCell, call: cst.Call) -> bool:
        use = self.names.use(cell, call.func)
        return use is not None and use.certain and use.row.old.endswith(".ParallelLoader")

    def _device(self, cell: CodeCell, call: cst.Call) -> cst.BaseExpression | None:
        """The only device of `ParallelLoader(loader, [device])`."""
        positional = [arg for arg in call.args if arg.keyword is None and not arg.star]
        devices = [arg for arg in call.args if arg.keyword and arg.keyword.value == "devices"]
        devices += positional[1:2]
        if len(positional) not in (1, 2) or len(devices) != 1:
            return None
        value = devices[0].value
        if not isinstance(value, (cst.List, cst.Tuple)) or len(value.elements) != 1:
            return None
        element = value.elements[0]
        return element.value if isinstance(element, cst.Element) else None

    def _asks(self, cell: CodeCell, node: cst.CSTNode, device: str) -> cst.Call | None:
        """The call `x.per_device_loader(device)` around an expression x."""
        attribute = self.names.parents[node]
        if not isinstance(attribute, cst.Attribute) or attribute.value is not node:
            return None
        call = self.names.parents[attribute]
        if (
            attribute.attr.value != "per_device_loader"
            or not isinstance(call, cst.Call)
            or call.func is not attribute
            or [self.names.cell_of(call).code(arg.value) for arg in call.args] != [device]
        ):
            return None
        return call

    def _direct(self, cell: CodeCell, call: cst.Call) -> bool:
        """`ParallelLoader(loader, [device]).per_device_loader(device)`."""
        device = self._device(cell, call)
        asked = None if device is None else self._asks(cell, call, cell.code(device))
        if device is None or asked is None or self._advances(asked):
            return False
        self._make(cell, call, device)
        cell.replace(cell.span(call)[1], cell.span(asked)[1], "")
        return True

    def _named(self, cell: CodeCell, call: cst.Call) -> bool:
        """`x = ParallelLoader(loader, [device])`, then only `x.per_device_loader(device)`."""
        assign = self.names.parents[call]
        if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
            return False
        target = assign.targets[0].target
        scope = self.names.scopes.get(target)
        if not isinstance(target, cst.Name) or scope is None:
            return False
        makers: list[tuple[CodeCell, cst.Call, cst.BaseExpression]] = []
        for assignment in scope[target.value]:
            node = getattr(assignment, "node", None)
            maker = self._maker(node) if isinstance(node, cst.Name) else None
            if assignment.scope is not scope or maker is None:
                return False
            makers.append(maker)
        devices = {maker[0].code(maker[2]) for maker in makers}
        if len(devices) != 1:
            return False
        asked = []
        for node in set(references(scope, target.value)):
            if isinstance(self.names.parents[node], cst.Del):
                continue
            request = self._asks(self.names.cell_of(node), node, next(iter(devices)))
            if request is None or self._advances(request):
                return False
            asked.append((node, request))
        for where, maker_call, device in makers:
            self._make(where, maker_call, device)
        for node, request in asked:
            where = self.names.cell_of(node)
            where.replace(where.span(node)[1], where.span(request)[1], "")
            where.note(self.names.line(node), f"{where.code(request)} → {where.code(node)}")
        return True

    def _maker(self, target: cst.Name) -> tuple[CodeCell, cst.Call, cst.BaseExpression] | None:
        """The ParallelLoader that is assigned to a name, with its only device."""
        parent = self.names.parents[target]
        assign = self.names.parents[parent]
        if not isinstance(parent, cst.AssignTarget) or not isinstance(assign, cst.Assign):
            return None
        cell = self.names.cell_of(assign)
        if not isinstance(assign.value, cst.Call) or not self._makes(cell, assign.value):
            return None
        device = self._device(cell, assign.value)
        return None if device is None else (cell, assign.value, device)

    def _advances(self, asked: cst.Call) -> bool:
        """`next(x.per_device_loader(device))`: the new loader is not an iterator."""
        around = self.names.parents[self.names.parents[asked]]
        return isinstance(around, cst.Call) and getattr(around.func, "value", None) == "next"

    def _make(self, cell: CodeCell, call: cst.Call, device: cst.BaseExpression) -> None:
        self._handled.add(call.func)
        if isinstance(call.func, cst.Attribute):
            cell.replace_node(call.func.attr, NEW)
        else:
            cell.replace_node(
                call.func, self.imports.spelled(f"{removed_apis.PL}.{NEW}", cell, call.func)
            )
        devices = self.names.parents[self.names.parents[device]]
        start, end = cell.span(devices)
        cell.replace(start, end, cell.code(device))
        arg = self.names.parents[devices]
        if isinstance(arg, cst.Arg) and arg.keyword is not None:
            cell.replace_node(arg.keyword, "device")
        for argument in call.args:
            if argument.keyword is not None and argument.keyword.value == "cpu_loader":
                cell.replace_node(argument.keyword, "loader")
        cell.note(self.names.line(call), f"ParallelLoader → {NEW}")
