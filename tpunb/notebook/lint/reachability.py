"""Decides whether a run certainly reaches a line; an error there stops the run before it starts.

There must be no false alarms: a line under a condition, in a loop, in `try` or `with`, in a
function that may not be called, or after a possible earlier exit does not count as reached.
"""

from __future__ import annotations

import ast
from functools import cached_property

from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.scopes import (
    BUILTINS,
    LAUNCHERS,
    TPUNB_LAUNCH,
    DefinedFunction,
    Frame,
    Function,
    Site,
    argument,
    dotted,
    last_part,
    literal,
)

EXITS = {"exit", "quit", "sys.exit", "os._exit", "os.abort", "os.execv", "os.kill"}

TRANSPARENT = {
    *("torch.no_grad", "torch.inference_mode", "torch.enable_grad", "torch.autocast"),
    "torch_xla.step",
}
"""Context managers that suppress no exceptions."""


_AROUND_LOADERS = ("enumerate", "tqdm", "track", "shard", "MpDeviceLoader")


class Reachability:
    """The code that a run of the snapshot's train cell certainly executes."""

    def __init__(self, notebook: NotebookIndex) -> None:
        self._notebook = notebook

    def reaches(self, site: Site) -> bool:
        """Whether the run certainly reaches a site."""
        if not site.cell.runs or self._may_end_early or not self._always(site):
            return False
        function = site.frame.function
        return function is None or (id(function) in self._called)

    def names_are_sure(self, site: Site, *, of_object: bool = False) -> bool:
        """Whether the name at a site certainly refers to the library's unmodified object, or is
        certainly unbound. `of_object`: the site calls a method of a tensor or module.
        """
        node = site.node
        if of_object:
            return not self._libraries_are_changed
        if isinstance(node, ast.Name) and not self._is_bound(node.id):
            return not self._modules_are_made
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Import | ast.ImportFrom):
            return not self._modules_are_made
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        certain = self._notebook.sites.is_certain(node, site.scope)
        return certain and not self._libraries_are_changed

    def _is_bound(self, name: str) -> bool:
        sites = self._notebook.sites
        return sites.binds(name) or name in BUILTINS or bool(sites.stars)

    def _always(self, site: Site) -> bool:
        """Whether a site runs whenever its function or cell does: it is in no condition or `try`,
        and in no loop that may be left early or never entered.
        """
        return site.fails() and all(self._is_entered(f, site) for f in site.frame.outward())

    def _is_entered(self, frame: Frame, site: Site) -> bool:
        node = frame.node
        if isinstance(node, ast.For):
            return self._repeats(node, site)
        if isinstance(node, ast.With):
            return all(self._only_enters(item.context_expr, site) for item in node.items)
        return isinstance(node, ast.Module | ast.ClassDef | ast.If | Function)

    def _only_enters(self, node: ast.expr, site: Site) -> bool:
        """Whether a context manager lets every exception of its block through."""
        return isinstance(node, ast.Call) and self._notebook.full(node.func, site) in TRANSPARENT

    def _repeats(self, loop: ast.For, site: Site) -> bool:
        """Whether a loop certainly has a first iteration: `range(3)`, or `range(epochs)` with
        `epochs = 3`; or it is over a DataLoader.
        """
        over = loop.iter
        if self._is_loader(over, site):
            return True
        if not isinstance(over, ast.Call) or last_part(over.func) != "range" or len(over.args) != 1:
            return False
        if not isinstance(over.args[0], ast.Name):
            values: list[ast.AST] = [over.args[0]]
        else:
            values = [v.node for v in self._notebook.values(over.args[0].id, site.frame)]
        numbers = [literal(value) for value in values]
        return bool(numbers) and all(type(n) is int and n > 0 for n in numbers)

    def _is_loader(self, node: ast.expr, site: Site, depth: int = 0) -> bool:
        """Whether an expression is a DataLoader, also in `enumerate(…)`, `tqdm(…)` and others."""
        if isinstance(node, ast.Call):
            if any(node is loader.node for loader in self._notebook.data_loaders):
                return True
            around = last_part(node.func) in _AROUND_LOADERS
            return around and bool(node.args) and self._is_loader(node.args[0], site, depth)
        values = self._notebook.values(dotted(node), site.frame) if depth < 3 else []
        return bool(values) and all(
            isinstance(value.node, ast.expr) and self._is_loader(value.node, value, depth + 1)
            for value in values
        )

    @cached_property
    def _may_end_early(self) -> bool:
        """Whether top-level code may end the program before the end of the notebook."""
        notebook = self._notebook
        if any(
            site.frame.function is None and isinstance(site.node, ast.Raise)
            for site in notebook.sites.leaves
        ):
            return True
        return any(
            (notebook.full(site.call.func, site) or dotted(site.call.func)) in EXITS
            for site in notebook.sites.calls
        )

    @cached_property
    def _modules_are_made(self) -> bool:
        """Whether the notebook adds modules itself: `sys.modules[...] = ...`."""
        return any(
            dotted(site.node).startswith("sys.")
            for site in self._notebook.sites.attributes("modules", "meta_path")
        )

    @cached_property
    def _libraries_are_changed(self) -> bool:
        """Whether the notebook sets or queries attributes of torch or torch_xla."""
        notebook = self._notebook
        for site in notebook.sites.attributes():
            node = site.node
            assert isinstance(node, ast.Attribute)
            if not isinstance(node.ctx, ast.Load) and notebook.full(node, site).startswith("torch"):
                return True
        for name in ("setattr", "hasattr", "getattr", "vars", "exec"):
            for site in notebook.called.get(name, ()):
                first = site.call.args[:1]
                if name == "exec" or any(
                    notebook.full(part, site).startswith("torch") for part in first
                ):
                    return True
        return self._modules_are_made

    @cached_property
    def _called(self) -> set[int]:
        """The functions, by id(), that the run certainly calls."""
        called: set[int] = set()
        todo: list[DefinedFunction] = []
        for site in self._notebook.sites.calls:
            if site.cell.runs and site.frame.function is None and self._always(site):
                todo += self._target(site)
        while todo:
            function = todo.pop()
            if id(function) in called:
                continue
            called.add(id(function))
            for site in function.calls:
                if self._always(site):
                    todo += self._target(site)
        return called

    def _target(self, site: Site) -> list[DefinedFunction]:
        """The function that a call certainly runs, by name or through a launcher."""
        notebook = self._notebook
        called: ast.expr | None = site.call.func
        full = notebook.full(site.call.func, site)
        if full == TPUNB_LAUNCH and site.cell.part != "train":
            return []  # a run of its own
        if full in LAUNCHERS:
            called = argument(site.call, "fn", 0) or argument(site.call, "function", 0)
        if isinstance(called, ast.Attribute):
            return self._method(called, site)
        if not isinstance(called, ast.Name):
            return []
        bindings = notebook.sites.bindings(called.id, site.scope)
        node = bindings[0].node if len(bindings) == 1 else None
        if isinstance(node, ast.ClassDef):
            return self._of_class(called.id, "__init__")
        functions = [f for f in notebook.functions.get(called.id, ()) if f.node is node]
        return [f for f in functions if f.outer.cell.runs and _is_plain(f.node)]

    def _method(self, called: ast.Attribute, site: Site) -> list[DefinedFunction]:
        """The method of the notebook that `x.f()` certainly runs: x is made by a class, or self."""
        notebook, name = self._notebook, dotted(called.value)
        function = site.frame.function
        if function is not None and function.method_of is not None and name == "self":
            return self._of_class(function.method_of.name, called.attr)
        makers = {
            value.node.func.id
            if isinstance(value.node, ast.Call) and isinstance(value.node.func, ast.Name)
            else ""
            for value in (notebook.values(name, site.frame) if name else ())
        }
        return self._of_class(makers.pop(), called.attr) if len(makers) == 1 else []

    def _of_class(self, name: str, method: str) -> list[DefinedFunction]:
        """A method that only this class of the notebook defines, and no class overrides."""
        every = [f for f in self._notebook.functions.get(method, ()) if f.method_of is not None]
        own = [f for f in every if f.method_of is not None and f.method_of.name == name]
        derived = any(name in map(last_part, bases) for bases in self._notebook.bases.values())
        scopes = self._notebook.sites.every
        bindings = (one for scope in scopes for one in scope.bindings.get(name, ()))
        assigned = any(isinstance(one.node, ast.Name) for one in bindings)
        if len(own) != 1 or derived or assigned or not own[0].outer.cell.runs:
            return []
        return own if _is_plain(own[0].node) else []


def _is_plain(node: ast.AST) -> bool:
    """Whether calling a function runs its body: it is no generator and has no decorator."""
    return (
        isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and not any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))
    )
