"""Decides whether a run certainly reaches a line; an error there stops the run before it starts.

There must be no false alarms: a line under a condition, in `try` or `with`, in a loop that may have
no first round, or in a function that may not be called, does not count as reached.
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
    last_part,
    literal,
)


class Reachability:
    """The code that a run of the snapshot's train cell certainly executes."""

    def __init__(self, notebook: NotebookIndex) -> None:
        self._notebook = notebook

    def reaches(self, site: Site) -> bool:
        """Whether the run certainly reaches a site."""
        if not site.cell.runs or not self._always(site):
            return False
        return site.frame.function is None or id(site.frame.function) in self._called

    def names_are_sure(self, site: Site) -> bool:
        """Whether the name at a site certainly refers to the library's unmodified object, or is
        certainly unbound.
        """
        node = site.node.func if isinstance(site.node, ast.Call) else site.node
        if self._libraries_are_changed or isinstance(node, ast.Import | ast.ImportFrom):
            return not self._libraries_are_changed
        unbound = isinstance(node, ast.Name) and not self._is_bound(node.id)
        return unbound or self._notebook.sites.is_certain(node, site.scope)

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
    def _libraries_are_changed(self) -> bool:
        """Whether the notebook sets or queries attributes of torch or torch_xla, or adds modules
        itself.
        """
        notebook = self._notebook
        changed = [
            notebook.full(site.node, site)
            for site in notebook.sites.attributes()
            if not isinstance(site.node.ctx, ast.Load)  # type: ignore[attr-defined]
        ]
        changed += [notebook.full(s.node, s) for s in notebook.sites.attributes("modules")]
        for name in ("setattr", "hasattr", "getattr", "vars"):
            for site in notebook.called.get(name, ()):
                changed += [notebook.full(part, site) for part in site.call.args[:1]]
        known = any(name.startswith("torch") or name == "sys.modules" for name in changed)
        return known or "exec" in notebook.called

    @cached_property
    def _called(self) -> set[int]:
        """The functions, by id(), that the run certainly calls."""
        called: set[int] = set()
        calls = [
            site
            for site in self._notebook.sites.calls
            if site.cell.runs and site.frame.function is None
        ]
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


def _is_plain(node: ast.AST) -> bool:
    """Whether calling a function runs its body: it is no generator and has no decorator."""
    return (
        isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and not any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))
    )
