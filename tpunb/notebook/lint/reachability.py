"""Decides whether a run certainly reaches a line; an error there stops the run before it starts.

There must be no false alarms: a line under a condition, in `try` or `with`, in a loop that may have
no first round, in a function that may not be called, or after a possible earlier exit does not
count as reached.
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


class Reachability:
    """The code that a run of the snapshot's train cell certainly executes."""

    def __init__(self, notebook: NotebookIndex) -> None:
        self._notebook = notebook

    def reaches(self, site: Site) -> bool:
        """Whether the run certainly reaches a site."""
        if not site.cell.runs or self._may_end_early or not self._always(site):
            return False
        return site.frame.function is None or id(site.frame.function) in self._called

    def names_are_sure(self, site: Site) -> bool:
        """Whether the name at a site certainly refers to the library's unmodified object, or is
        certainly unbound.
        """
        node = site.node.func if isinstance(site.node, ast.Call) else site.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            return not self._modules_are_made
        if isinstance(node, ast.Name) and not self._is_bound(node.id):
            return not self._modules_are_made
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
            managers = [item.context_expr for item in node.items]
            calls = [part.func for part in managers if isinstance(part, ast.Call)]
            known = all(self._notebook.full(call, site) in TRANSPARENT for call in calls)
            return known and len(calls) == len(managers)
        return isinstance(node, ast.Module | ast.ClassDef | ast.If | Function)

    def _repeats(self, loop: ast.For, site: Site) -> bool:
        """Whether a loop certainly has a first iteration: `range(3)`, or `range(epochs)` with
        `epochs = 3`.
        """
        over = loop.iter
        if not isinstance(over, ast.Call) or last_part(over.func) != "range" or len(over.args) != 1:
            return False
        values: list[ast.AST] = [over.args[0]]
        if isinstance(over.args[0], ast.Name):
            values = [v.node for v in self._notebook.values(over.args[0].id, site.frame)]
        numbers = [literal(value) for value in values]
        return bool(numbers) and all(type(n) is int and n > 0 for n in numbers)

    @cached_property
    def _may_end_early(self) -> bool:
        """Whether top-level code may end the program before the end of the notebook."""
        notebook = self._notebook
        raises = (isinstance(s.node, ast.Raise) for s in notebook.sites.leaves if _is_top(s))
        return any(raises) or any(
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
        calls = [site for site in self._notebook.sites.calls if site.cell.runs and _is_top(site)]
        while calls:
            site = calls.pop()
            for function in self._target(site) if self._always(site) else ():
                if id(function) not in called:
                    called.add(id(function))
                    calls += function.calls
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
        if not isinstance(called, ast.Name):
            return []
        bindings = notebook.sites.bindings(called.id, site.scope)
        node = bindings[0].node if len(bindings) == 1 else None
        functions = [f for f in notebook.functions.get(called.id, ()) if f.node is node]
        return [f for f in functions if f.outer.cell.runs and _is_plain(f.node)]


def _is_top(site: Site) -> bool:
    return site.frame.function is None


def _is_plain(node: ast.AST) -> bool:
    """Whether calling a function runs its body: it is no generator and has no decorator."""
    return (
        isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and not any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))
    )
