"""`ParallelLoader(loader, [device]).per_device_loader(device)` → `MpDeviceLoader(…)`."""

from __future__ import annotations

import ast

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.imports import NotebookImports
from tpunb.notebook.migrate.names import arguments

NEW = "MpDeviceLoader"


class LoaderRewriter:
    """Rewrites a ParallelLoader if all its uses are visible; `CallRewriter` marks the others."""

    def __init__(self, imports: NotebookImports) -> None:
        self.imports = imports
        self.names = imports.names
        self.removals = imports.removals
        self.handled: set[ast.AST] = set()
        """The uses of the class that were rewritten."""

    def apply(self) -> None:
        for _, node in self.names.walk():
            if not isinstance(node, ast.Call) or node in self.removals:
                continue
            if self._makes(node) and node.func not in self.handled and not self._direct(node):
                self._named(node)

    def _makes(self, call: ast.Call) -> bool:
        use = self.names.use(call.func)
        return use is not None and use.certain and use.row.old.endswith(".ParallelLoader")

    def _device(self, call: ast.Call) -> str | None:
        """The only device of `ParallelLoader(loader, [device])`."""
        devices = _devices(call)
        if not 1 <= len(call.args) <= 2 or len(devices) != 1:
            return None
        value = devices[0]
        if not isinstance(value, ast.List | ast.Tuple) or len(value.elts) != 1:
            return None
        starred = isinstance(value.elts[0], ast.Starred)
        return None if starred else self.names.cell_of(call).code(value.elts[0])

    def _request(self, node: ast.AST, device: str | None) -> ast.Call | None:
        """The call `x.per_device_loader(device)` around an expression x.

        None for `next(x.per_device_loader(device))`: the new loader is not an iterator.
        """
        attribute = self.names.parents[node]
        call = self.names.parents[attribute]
        around = self.names.parents.get(call)
        if (
            not isinstance(attribute, ast.Attribute)
            or attribute.attr != "per_device_loader"
            or not isinstance(call, ast.Call)
            or [self.names.cell_of(call).code(arg.node) for arg in arguments(call)] != [device]
            or (isinstance(around, ast.Call) and getattr(around.func, "id", "") == "next")
        ):
            return None
        return call

    def _direct(self, call: ast.Call) -> bool:
        """`ParallelLoader(loader, [device]).per_device_loader(device)`."""
        request = self._request(call, self._device(call))
        if request is not None:
            self._make(call)
            self._drop_request(call, request)
        return request is not None

    def _named(self, call: ast.Call) -> None:
        """`x = ParallelLoader(loader, [device])`, then only `x.per_device_loader(device)`."""
        assign = self.names.parents[call]
        if not isinstance(assign, ast.Assign) or not isinstance(assign.targets[0], ast.Name):
            return
        target = assign.targets[0]
        makers = [self._maker(binding.node) for binding in self.names.bindings(target)]
        devices = {self._device(maker) if maker is not None else None for maker in makers}
        nodes = self.names.references(target.id, self.names.scope(target))
        requests = [(node, self._request(node, next(iter(devices)))) for node in nodes]
        if len(devices) > 1 or None in devices or not all(request for _, request in requests):
            return
        for maker in makers:
            if maker is not None:
                self._make(maker)
        for node, request in requests:
            if request is not None:
                cell = self.names.cell_of(node)
                self._drop_request(node, request)
                cell.note(self.names.line(node), f"{cell.code(request)} → {cell.code(node)}")

    def _maker(self, target: ast.AST) -> ast.Call | None:
        """The ParallelLoader that is assigned to a name."""
        assign = self.names.parents[target]
        if not isinstance(assign, ast.Assign) or not isinstance(assign.value, ast.Call):
            return None
        return assign.value if target in assign.targets and self._makes(assign.value) else None

    def _drop_request(self, node: ast.expr, request: ast.Call) -> None:
        cell = self.names.cell_of(node)
        cell.replace(cell.span(node)[1], cell.bare_span(request)[1], "")

    def _make(self, call: ast.Call) -> None:
        cell = self.names.cell_of(call)
        self.handled.add(call.func)
        if isinstance(call.func, ast.Attribute):
            end = cell.bare_span(call.func)[1]
            cell.replace(end - len(call.func.attr), end, NEW)
        else:
            new = self.imports.spelled(f"{removed_apis.PL}.{NEW}", call.func)
            cell.replace_node(call.func, new)
        cell.replace_node(_devices(call)[0], self._device(call) or "")
        for word in call.keywords:
            if word.arg in ("devices", "cpu_loader"):
                start = cell.bare_span(word)[0]
                new = "device" if word.arg == "devices" else "loader"
                cell.replace(start, start + len(word.arg), new)
        cell.note(self.names.line(call), f"ParallelLoader → {NEW}")


def _devices(call: ast.Call) -> list[ast.expr]:
    named = [word.value for word in call.keywords if word.arg == "devices"]
    return named + call.args[1:2]
