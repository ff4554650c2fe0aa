"""Rewrites removed names and calls in code, except imports."""

from __future__ import annotations

import ast

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell, line_of
from tpunb.notebook.migrate.imports import NotebookImports
from tpunb.notebook.migrate.names import Argument, RemovedApiUse, arguments
from tpunb.notebook.scopes import XM, dotted

BY_HAND = ("ParallelLoader", "DataParallel")
FROM_ZERO = (
    "Devices are numbered from 0 now, and in a run each rank has its own: `torch_xla.device()`."
)
WAITS = "torch_xla.launch always waits for the ranks, and returns nothing."
UNSURE = "`{name}` may be torch_xla's or your own: if it is torch_xla's, {advice}"
DEVICES = f"{XM}.get_xla_supported_devices"
WITHOUT_ARGUMENTS = [
    f"{removed_apis.XR}.{name}" for name in ("world_size", "global_ordinal", "local_ordinal")
]


class CallRewriter:
    """Rewrites names and the arguments of calls."""

    def __init__(self, imports: NotebookImports, handled: set[ast.AST]) -> None:
        self.imports = imports
        self.names = imports.names
        self.removals = imports.removals
        self.handled = handled
        """Uses of classes that other rewriters rewrote."""

    def apply(self) -> None:
        done: set[ast.AST] = set()
        for cell, node in self.names.walk():
            if isinstance(node, ast.Call) and node not in self.removals:
                self._devices(cell, node)
                self._replicas_of(cell, node)
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            use = None
            if node not in done and isinstance(node.ctx, ast.Load):
                use = self.names.use(node)
            if use is not None and node not in self.removals:
                self._use(use)
            if isinstance(node, ast.Attribute) and (node in done or use is not None):
                done.add(node.value)

    def _use(self, use: RemovedApiUse) -> None:
        cell, node, row = use.cell, use.node, use.row
        line = self.names.line(node)
        call = self.names.parents[node]
        given = call if isinstance(call, ast.Call) and call.func is node else None
        if row.old.endswith(BY_HAND):
            if given is not None and node not in self.handled:
                cell.mark(line, row.advice, before=node)
            return
        if not use.certain:
            advice = row.advice[0].lower() + row.advice[1:]
            cell.mark(line, UNSURE.format(name=cell.code(node), advice=advice))
            return
        edits = cell.edits
        if row.new is None or not self._rewrite_arguments(cell, given, row.new, line):
            cell.mark(line, row.advice, before=node)
            return
        written = self._written(use, row.new)
        what = row.advice
        if written is not None and written != cell.code(node):
            cell.replace_node(node, written)
            what = f"{cell.code(node)} → {written}"
        if cell.edits > edits:
            cell.note(line, what, before=cell.lines[line_of(node)])

    def _written(self, use: RemovedApiUse, new: str) -> str | None:
        """The new text of a name; None if its import was rewritten and the name stays."""
        known = removed_apis.lookup_name(use.imported)
        current = known.new if known is not None and known.new else use.imported
        if isinstance(use.node, ast.Name):
            return None
        if current + use.row.old[len(use.imported) :] == new:
            return new if use.cell.code(use.node) == use.row.old else None
        self.imports.release(use.node)
        return self.imports.spelled(new, use.node)

    # Calls

    def _rewrite_arguments(
        self, cell: CodeCell, call: ast.Call | None, new: str, line: int
    ) -> bool:
        """Rewrite the arguments of a call for its new function; False if that is impossible."""
        if new == "torch_xla.launch":
            return call is not None and self._launch(cell, arguments(call), line)
        if new == "torch.autocast":
            return call is not None and self._autocast(cell, call)
        if new == "torch_xla.device" and call is not None:
            self._device(cell, arguments(call), line)
        elif new in WITHOUT_ARGUMENTS and call is not None and arguments(call):
            cell.replace(cell.span(call.func)[1], cell.bare_span(call)[1], "()")
        return True

    def _devices(self, cell: CodeCell, call: ast.Call) -> None:
        """`get_xla_supported_devices(devkind='TPU')`: remove the kind of device."""
        if DEVICES not in self.names.current_names(call.func):
            return
        given = arguments(call)
        for index, argument in enumerate(given):
            text = isinstance(getattr(argument.value, "value", None), str)
            if argument.name == "devkind" or (index == 0 and not argument.name and text):
                remove_argument(cell, given, index)
                cell.note(self.names.line(call), "kind of device removed: PJRT_DEVICE sets it")

    def _replicas_of(self, cell: CodeCell, call: ast.Call) -> None:
        """`DistributedSampler(…, num_replicas=8, rank=xm.get_ordinal())`: use the world size."""
        given = {word.arg: word.value for word in call.keywords}
        number, rank = given.get("num_replicas"), given.get("rank")
        if not _is_integer(number) or number is None or not isinstance(rank, ast.Call):
            return
        use = self.names.use(rank.func)
        if use is not None and use.certain and use.row.new == f"{removed_apis.XR}.global_ordinal":
            world = self.imports.spelled(f"{removed_apis.XR}.world_size", rank.func)
            before = cell.code(number)
            cell.replace_node(number, f"{world}()")
            cell.note(self.names.line(call), f"num_replicas: {before} → {world}()")

    def _device(self, cell: CodeCell, given: list[Argument], line: int) -> None:
        for index, argument in enumerate(given):
            name = argument.name or ("n", "devkind")[min(index, 1)]
            if name == "devkind":
                remove_argument(cell, given, index)
                continue
            if argument.name:
                cell.replace(cell.span(argument.node)[0], cell.span(argument.value)[0], "")
            if ast.unparse(argument.value) not in ("0", "None"):
                cell.mark(line, FROM_ZERO)

    def _launch(self, cell: CodeCell, given: list[Argument], line: int) -> bool:
        """Rewrite the arguments of `xmp.spawn` for `torch_xla.launch`; False if they are hidden."""
        order = ("fn", "args", "nprocs", "join", "daemon", "start_method")
        names = [one.name or order[min(index, 5)] for index, one in enumerate(given)]
        values = dict(zip(names, [argument.value for argument in given], strict=True))
        if any(argument.star for argument in given) or "fn" not in values:
            return False
        # Processes started with the method `spawn` cannot find a function of the notebook.
        forks = "start_method" not in values and self.names.defined_here(values["fn"])
        single = _single(cell, values["nprocs"]) if "nprocs" in values else None
        gone = {"join", "daemon"} | ({"nprocs"} if single is None else set())
        last = max(index for index, name in enumerate(names) if name not in gone)
        added = ", start_method='fork'" if forks else ""
        if last == len(names) - 1:
            cell.insert(cell.span(given[last].node)[1], added)
        for index, (name, argument) in enumerate(zip(names, given, strict=True)):
            if name in gone:
                remove_argument(cell, given, index, added if index == last + 1 else "")
                if name == "join" and ast.unparse(argument.value) != "True":
                    cell.mark(line, WAITS)
            elif name == "nprocs":
                cell.replace_node(argument.node, f"debug_single_process={single}")
            elif name == "start_method" and not argument.name:
                cell.insert(cell.span(argument.node)[0], "start_method=")
        return True

    def _autocast(self, cell: CodeCell, call: ast.Call) -> bool:
        given = arguments(call)
        if not given or any(argument.star for argument in given):
            return False
        if given[0].name not in ("", "device") or not dotted(call.func):
            return False
        cell.replace_node(given[0].node, "'xla'")
        if not any(argument.name == "dtype" for argument in given) and len(call.args) < 3:
            cell.insert(cell.span(given[-1].node)[1], ", dtype=torch.bfloat16")
        # Its second argument was `enabled`; that of torch.autocast is `dtype`.
        names = ("enabled=", "dtype=", "cache_enabled=")
        for name, value in zip(names, call.args[1:], strict=False):
            cell.insert(cell.span(value)[0], name)
        return True


def _single(cell: CodeCell, value: ast.expr) -> str | None:
    """The value of `debug_single_process` for a value of `nprocs`; None if it is omitted."""
    if ast.unparse(value) == "1":
        return "True"
    if _is_integer(value) or ast.unparse(value) == "None":
        return None
    text = cell.code(value)
    simple = isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
    in_parentheses = cell.span(value) != cell.bare_span(value)
    return f"{text} == 1" if simple or in_parentheses else f"({text}) == 1"


def _is_integer(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _after(cell: CodeCell, argument: Argument) -> int:
    """The end of an argument, including the comma after it."""
    end = cell.span(argument.node)[1]
    comma = cell.next_code(end)
    return comma + 1 if cell.text[comma : comma + 1] == "," else end


def remove_argument(cell: CodeCell, given: list[Argument], index: int, instead: str = "") -> None:
    """Remove an argument from a call; comments stay. `instead` goes after the previous argument."""
    start, end = cell.span(given[index].node)
    if index:
        before = cell.span(given[index - 1].node)[1]
        if "#" not in cell.text[before:start]:
            cell.replace(before, end, instead)
        else:
            cell.replace(start, _after(cell, given[index]), "")
            cell.insert(before, instead)
    else:
        after = _after(cell, given[index])
        if len(given) > 1 and "#" not in cell.text[end : cell.span(given[1].node)[0]]:
            after = cell.span(given[1].node)[0]
        cell.replace(start, after, "")
