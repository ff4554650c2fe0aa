"""Whether a run surely comes to a place: the errors found there stop it before it starts.

Never a false alarm: a place under a condition, in a loop, in `try` or `with`, in a function that
may not be called, or behind something that may leave earlier does not count.
"""

from __future__ import annotations

import ast
from functools import cached_property

from tpunb.lint.book import LAUNCHERS, Book
from tpunb.lint.expressions import argument, call, dotted
from tpunb.lint.walk import Defined, Site
from tpunb.script.statements import Function

EXITS = {"exit", "quit", "sys.exit", "os._exit", "os.abort", "os.execv", "os.kill"}


class Certainty:
    """What a run of the snapshot's train cell surely executes."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def reaches(self, site: Site) -> bool:
        """Whether the run surely comes to a site."""
        if not site.page.runs or self._may_end_early or not site.simple():
            return False
        function = site.frame.function
        return function is None or (id(function) in self._called and not _left(function, site))

    def names_are_sure(self, site: Site) -> bool:
        """Whether the name at a site means the library's own, and nothing was put into it."""
        node = site.node
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Import | ast.ImportFrom):
            return not self._modules_are_made
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        return self._book.names.sure(node) and not self._libraries_are_changed

    @cached_property
    def _may_end_early(self) -> bool:
        """Whether the notebook may be left at cell level before its end."""
        book = self._book
        if any(
            site.frame.function is None and isinstance(site.node, ast.Raise)
            for site in book.sites.leaves
        ):
            return True
        return any(
            (book.full(call(site).func, site) or dotted(call(site).func)) in EXITS
            for site in book.sites.calls
        )

    @cached_property
    def _modules_are_made(self) -> bool:
        """Whether the notebook itself adds modules: `sys.modules[...] = ...`."""
        return any(
            dotted(site.node).startswith("sys.")
            for site in self._book.sites.attributes("modules", "meta_path")
        )

    @cached_property
    def _libraries_are_changed(self) -> bool:
        """Whether the notebook sets or looks for attributes of torch or torch_xla."""
        book = self._book
        for site in book.sites.attributes():
            node = site.node
            assert isinstance(node, ast.Attribute)
            if not isinstance(node.ctx, ast.Load) and book.full(node, site).startswith("torch"):
                return True
        for name in ("setattr", "hasattr", "getattr", "vars", "exec"):
            for site in book.called.get(name, ()):
                first = call(site).args[:1]
                if name == "exec" or any(
                    book.full(part, site).startswith("torch") for part in first
                ):
                    return True
        return self._modules_are_made

    @cached_property
    def _called(self) -> set[int]:
        """The functions, by id(), that the run surely calls."""
        found: set[int] = set()
        todo: list[Defined] = []
        for site in self._book.sites.calls:
            if site.page.runs and site.frame.function is None and site.simple():
                todo += self._target(site)
        while todo:
            function = todo.pop()
            if id(function) in found:
                continue
            found.add(id(function))
            for site in function.calls:
                if site.simple() and not _left(function, site):
                    todo += self._target(site)
        return found

    def _target(self, site: Site) -> list[Defined]:
        """The function that a call surely runs: called by its name, or launched."""
        book = self._book
        called: ast.expr | None = call(site).func
        if book.full(call(site).func, site) in LAUNCHERS:
            called = argument(call(site), "fn", 0) or argument(call(site), "function", 0)
        if not isinstance(called, ast.Name):
            return []
        functions = book.functions.get(called.id, [])
        if len(functions) != 1 or book.names.assigned(called.id):
            return []
        function = functions[0]
        node = function.node
        plain = isinstance(node, ast.FunctionDef) and not node.decorator_list
        shadowed = called.id in book.names.imported
        if not plain or shadowed or function.outer.function or function.method_of:
            return []
        if not function.outer.page.runs or _yields(node):
            return []
        return [function]


def _yields(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))


def _left(function: Defined, site: Site) -> bool:
    """Whether a function may be left before it comes to a site in it."""
    assert isinstance(function.node, Function)
    return any(
        isinstance(part, ast.Return | ast.Raise) and part.lineno <= site.line
        for part in ast.walk(function.node)
        if part is not site.node
    )
