"""Rewrites removed names and calls in code, except imports."""

from __future__ import annotations

import libcst as cst

from tpunb.notebook import removed_apis
from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.migrate.imports import NotebookImports
from tpunb.notebook.migrate.names import NotebookNames, RemovedApiUse, root_of
from tpunb.notebook.migrate.rewrites.data_parallel import DataParallelRewriter
from tpunb.notebook.migrate.rewrites.loaders import LoaderRewriter
from tpunb.notebook.migrate.statements import Removals

BY_HAND = ("ParallelLoader", "DataParallel")
FROM_ZERO = (
    "Devices are numbered from 0 now, and in a run each rank has its own: `torch_xla.device()`."
)
WAITS = "torch_xla.launch always waits for the ranks, and returns nothing."
UNSURE = "`{name}` may be torch_xla's or your own: if it is torch_xla's, {advice}"
DEVICES = f"{removed_apis.XM}.get_xla_supported_devices"


class CallRewriter:
    """Rewrites names and the arguments of calls."""

    def __init__(
        self,
        names: NotebookNames,
        imports: NotebookImports,
        removals: Removals,
        loaders: LoaderRewriter,
        data_parallel: DataParallelRewriter,
    ) -> None:
        self.names = names
        self.imports = imports
        self.removals = removals
        self.loaders = loaders
        self.data_parallel = data_parallel

    def apply(self) -> None:
        """Make all edits."""
        done: set[cst.CSTNode] = set()
        for cell, node in self.names.walk():
            if node in done or isinstance(node, (cst.Import, cst.ImportFrom)):
                done.update(node.children)
                continue
            if isinstance(node, cst.Call):
                self._devices(cell, node)
                self._replicas_of(cell, node)
            if isinstance(node, (cst.Name, cst.Attribute)) and self._is_read(node):
                use = self.names.use(cell, node)
                if use is not None:
                    done.update(node.children)
                    if node not in self.removals:
                        self._use(use)

    def _is_read(self, node: cst.Name | cst.Attribute) -> bool:
        """Whether a name is read as a value, and is not the name of an argument or attribute."""
        parent = self.names.parents[node]
        if isinstance(parent, cst.Attribute):
            return parent.value is node
        if isinstance(parent, cst.Arg):
            return parent.value is node
        return not isinstance(
            parent, (cst.Param, cst.FunctionDef, cst.ClassDef, cst.AssignTarget, cst.AsName)
        )

    def _use(self, use: RemovedApiUse) -> None:
        cell, node, row = use.cell, use.node, use.row
        line = self.names.line(node)
        call = self.names.parents[node]
        leaf = row.old.rpartition(".")[2]
        if leaf in BY_HAND:
            if self.loaders.handled(node) or self.data_parallel.handled(node):
                return
            if isinstance(call, cst.Call):
                cell.mark(line, row.advice, before=node)
            return
        if not use.certain:
            advice = row.advice[0].lower() + row.advice[1:]
            cell.mark(line, UNSURE.format(name=cell.code(node), advice=advice))
            return
        if row.new is None:
            cell.mark(line, row.advice, before=node)
            return
        arguments = call if isinstance(call, cst.Call) and call.func is node else None
        what = ""
        edits = cell.edits
        if row.new == "torch_xla.launch":
            if arguments is None or not self._launch(cell, arguments, line):
                cell.mark(line, row.advice, before=node)
                return
        elif row.new == "torch_xla.device" and arguments is not None:
            self._device(cell, arguments, line)
        elif row.new in (
            f"{removed_apis.XR}.{name}"
            for name in ("world_size", "global_ordinal", "local_ordinal")
        ):
            if arguments is not None and arguments.args:
                first, last = arguments.args[0], arguments.args[-1]
                cell.replace(cell.span(first)[0], _after(cell, last), "")
        elif row.new == "torch.autocast" and not (arguments and self._autocast(cell, arguments)):
            cell.mark(line, row.advice, before=node)
            return
        written = self._written(use, row.new)
        if written is not None and written != cell.code(node):
            cell.replace_node(node, written)
            what = f"{cell.code(node)} → {written}"
        if cell.edits > edits:
            cell.note(line, what or row.advice, before=cell.lines[cell.line_of(node)])

    def _written(self, use: RemovedApiUse, new: str) -> str | None:
        """The new text of a name; None if its import was rewritten and the name stays."""
        imported = removed_apis.lookup_name(use.imported)
        current = imported.new if imported is not None and imported.new else use.imported
        if isinstance(use.node, cst.Name):
            return None
        reached = current + use.row.old[len(use.imported) :]
        if reached == new:
            return new if use.plain else None
        self.imports.release(use.node)
        return self.imports.spelled(new, use.cell, use.node)

    # Calls

    def _devices(self, cell: CodeCell, call: cst.Call) -> None:
        """`get_xla_supported_devices(devkind='TPU')`: remove the kind of device."""
        row = {removed_apis.lookup_name(name) for name in self.names.full_names(call)} - {None}
        current = {known.new for known in row if known is not None} | set(
            self.names.full_names(call)
        )
        if DEVICES not in current or call in self.removals:
            return
        for index, arg in enumerate(call.args):
            by_name = arg.keyword is not None and arg.keyword.value == "devkind"
            by_place = (
                index == 0 and arg.keyword is None and isinstance(arg.value, cst.SimpleString)
            )
            if by_name or by_place:
                _remove(cell, call, index)
                cell.note(self.names.line(call), "kind of device removed: PJRT_DEVICE sets it")

    def _replicas_of(self, cell: CodeCell, call: cst.Call) -> None:
        """`DistributedSampler(…, num_replicas=8, rank=xm.get_ordinal())`: use the world size."""
        given = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
        number, rank = given.get("num_replicas"), given.get("rank")
        if not isinstance(number, cst.Integer) or not isinstance(rank, cst.Call):
            return
        use = self.names.use(cell, rank.func)
        if use is not None and use.certain and use.row.new == f"{removed_apis.XR}.global_ordinal":
            world = self.imports.spelled(f"{removed_apis.XR}.world_size", cell, rank.func)
            cell.replace_node(number, f"{world}()")
            cell.note(self.names.line(call), f"num_replicas: {number.value} → {world}()")

    def _device(self, cell: CodeCell, call: cst.Call, line: int) -> None:
        for index, arg in enumerate(call.args):
            name = arg.keyword.value if arg.keyword else ("n", "devkind")[min(index, 1)]
            if name == "devkind":
                _remove(cell, call, index)
                continue
            if arg.keyword is not None:
                cell.replace(cell.span(arg)[0], cell.span(arg.value)[0], "")
            if cell.code(arg.value) not in ("0", "None"):
                cell.mark(line, FROM_ZERO)

    def _launch(self, cell: CodeCell, call: cst.Call, line: int) -> bool:
        """Rewrite the arguments of `xmp.spawn` for `torch_xla.launch`; False if they are hidden."""
        if any(arg.star for arg in call.args) or not call.args:
            return False
        order = ("fn", "args", "nprocs", "join", "daemon", "start_method")
        names = [
            a.keyword.value if a.keyword else order[min(i, 5)] for i, a in enumerate(call.args)
        ]
        given = dict(zip(names, call.args, strict=True))
        if "fn" not in given:
            return False
        # Processes started with the method `spawn` cannot find a function of the notebook.
        forks = "start_method" not in given and self.names.defined_here(given["fn"].value)
        single = _single(cell, given["nprocs"].value) if "nprocs" in given else None
        gone = {"join", "daemon"} | ({"nprocs"} if single is None else set())
        last = max(index for index, name in enumerate(names) if name not in gone)
        added = ", start_method='fork'" if forks else ""
        if last == len(names) - 1:
            at = cell.span(call.args[last])[1]
            cell.replace(at, at, added)
        for index, (name, arg) in enumerate(zip(names, call.args, strict=True)):
            if name in gone:
                _remove(cell, call, index, added if index == last + 1 else "")
                if name == "join" and cell.code(arg.value) != "True":
                    cell.mark(line, WAITS)
            elif name == "nprocs":
                cell.replace(*cell.span(arg), f"debug_single_process={single}")
            elif name == "start_method" and arg.keyword is None:
                at = cell.span(arg)[0]
                cell.replace(at, at, "start_method=")
        return True

    def _autocast(self, cell: CodeCell, call: cst.Call) -> bool:
        if not call.args or any(arg.star for arg in call.args):
            return False
        first = call.args[0]
        if first.keyword is not None and first.keyword.value != "device":
            return False
        cell.replace(*cell.span(first), "'xla'")
        names = [arg.keyword.value if arg.keyword else "" for arg in call.args]
        if "dtype" not in names and len([name for name in names if not name]) < 3:
            at = cell.span(call.args[-1])[1]
            cell.replace(at, at, ", dtype=torch.bfloat16")
        # Its second argument was `enabled`; that of torch.autocast is `dtype`.
        for name, arg in zip(("enabled=", "dtype=", "cache_enabled="), call.args[1:], strict=False):
            if arg.keyword is None:
                cell.replace(cell.span(arg)[0], cell.span(arg)[0], name)
        return root_of(call.func) is not None


def _single(cell: CodeCell, value: cst.BaseExpression) -> str | None:
    """The value of `debug_single_process` for a value of `nprocs`; None if it is omitted."""
    text = cell.code(value)
    if text == "1":
        return "True"
    if isinstance(value, cst.Integer) or text == "None":
        return None
    simple = isinstance(value, (cst.Name, cst.Attribute, cst.Subscript, cst.Call))
    return f"{text} == 1" if simple or value.lpar else f"({text}) == 1"


def _after(cell: CodeCell, arg: cst.Arg) -> int:
    """The end of an argument, including the comma after it."""
    end = cell.span(arg)[1]
    if isinstance(arg.comma, cst.Comma):
        end = max(end, cell.span(arg.comma)[0] + 1)
    return end


def _remove(cell: CodeCell, call: cst.Call, index: int, instead: str = "") -> None:
    """Remove an argument from a call; comments stay. `instead` goes after the previous argument."""
    arg = call.args[index]
    start, end = cell.span(arg)[0], cell.span(arg)[1]
    if index:
        before = cell.span(call.args[index - 1])[1]
        if "#" not in cell.text[before:start]:
            cell.replace(before, end, instead)
        else:
            cell.replace(start, _after(cell, arg), "")
            cell.replace(before, before, instead)
    elif len(call.args) > 1:
        after = cell.span(call.args[1])[0]
        between = cell.text[end:after]
        cell.replace(start, after if "#" not in between else _after(cell, arg), "")
    else:
        cell.replace(start, _after(cell, arg), "")
