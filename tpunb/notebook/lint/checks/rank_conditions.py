"""Which ranks reach a site: evaluates the conditions around it as each rank would."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from tpunb.notebook.lint.index import RANK_CALLS, RANKS, NotebookIndex
from tpunb.notebook.scopes import Site, last_part

_WORLD_SIZE = re.compile(r"(get_|xrt_)?world_size")
_SIZES = (2, 3, 4, 8, 16, 32, 64, 128, 100_000)
"""World sizes for which conditions are evaluated if the run's own is not known."""
_OPERATORS: dict[type[ast.AST], Callable[..., object]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mod: operator.mod},
    **{ast.Not: operator.not_, ast.USub: operator.neg},
}

Outcomes = dict[tuple[int, int], bool | None]
"""World size and rank → whether that rank reaches a site; None if that is not known."""


def condition_on_rank(notebook: NotebookIndex, site: Site) -> ast.expr | None:
    """Return the condition because of which only some of the ranks make a call; None if all do,
    or if the others make the same call elsewhere in the function.
    """
    tests = [test for test, _ in site.conditions() if notebook.depends_on_rank(test, site)]
    if not tests:
        return None
    ours = _outcomes(notebook, site)
    some = {size for size in _sizes(notebook) if len({ours[r] for r in ours if r[0] == size}) > 1}
    missing = {rank for rank, reached in ours.items() if rank[0] in some and reached is False}
    for other in notebook.called.get(last_part(site.call.func), ()) if missing else ():
        if other is not site and other.frame.function is site.frame.function:
            theirs = {rank for rank, at in _outcomes(notebook, other).items() if at is not False}
            if theirs.isdisjoint(rank for rank in ours if ours[rank] is not False):
                missing -= theirs
    return tests[0] if missing else None


def sure_branch(notebook: NotebookIndex, site: Site) -> Site | None:
    """Return the `if` around a site if it certainly holds on one of ranks 0 and 1 only."""
    frame = site.frame
    if not isinstance(frame.node, ast.If) or frame.parent is None:
        return None
    ranks = [_Evaluator(notebook, rank, 2, strict=True) for rank in (0, 1)]
    results = {rank.result(frame.node.test, site) for rank in ranks}
    return Site(frame.node, frame.parent) if results == {True, False} else None


def _sizes(notebook: NotebookIndex) -> tuple[int, ...]:
    return _SIZES if notebook.ranks is None else (notebook.ranks,)


def _outcomes(notebook: NotebookIndex, site: Site) -> Outcomes:
    conditions = list(site.conditions())
    outcomes: Outcomes = {}
    for size in _sizes(notebook):
        for rank in {*range(min(size, 16)), size - 1}:
            evaluator = _Evaluator(notebook, rank, size)
            results = [evaluator.result(test, site) for test, _ in conditions]
            held = [
                None if result is None else result == wanted
                for result, (_, wanted) in zip(results, conditions, strict=True)
            ]
            outcomes[size, rank] = False if False in held else None if None in held else True
    return outcomes


class _UnknownError(Exception):
    """The value of an expression is not known."""


@dataclass(frozen=True)
class _Evaluator:
    """Evaluates expressions as one rank of a run does."""

    notebook: NotebookIndex
    rank: int
    size: int
    strict: bool = False
    """Whether only what is certain counts: not a name like `rank` or `world_size`."""

    def result(self, test: ast.expr, site: Site, depth: int = 0) -> bool | None:
        """Whether a condition holds; None if that is not known. A condition that depends on the
        rank in an unknown way is taken to hold on rank 0 only.
        """
        try:
            return bool(self._value(test, site, depth))
        except (_UnknownError, TypeError, ZeroDivisionError):
            parts = isinstance(test, ast.BoolOp | ast.UnaryOp)  # these have results of their own
            if self.strict or parts or not self.notebook.depends_on_rank(test, site):
                return None
            return self.rank == 0

    def _value(self, node: ast.AST, site: Site, depth: int) -> object:
        def value(part: ast.AST) -> object:
            return self._value(part, site, depth)

        match node:
            case ast.Constant():
                return node.value
            case ast.UnaryOp(op=ast.Not()):
                if (result := self.result(node.operand, site, depth)) is not None:
                    return not result
            case ast.UnaryOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](value(node.operand))
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.Compare(ops=[op]):
                return _OPERATORS[type(op)](value(node.left), value(node.comparators[0]))
            case ast.BoolOp():
                results = [self.result(part, site, depth) for part in node.values]
                ends = isinstance(node.op, ast.Or)
                if ends in results:
                    return ends
                if None not in results:
                    return not ends
            case ast.List() | ast.Tuple() | ast.Set():
                return [value(part) for part in node.elts]
            case ast.Call() if self.notebook.full(node.func, site) == "range":
                return range(*map(value, node.args))  # type: ignore[call-overload]
            case ast.Name() | ast.Attribute() | ast.Call():
                return self._of_name(node, site, depth)
        raise _UnknownError

    def _of_name(self, node: ast.expr, site: Site, depth: int) -> object:
        """The value of `rank`, `xr.global_ordinal()`, `is_master`, `world_size`."""
        values = self.notebook.values(node.id, site.frame) if isinstance(node, ast.Name) else []
        followed = not self.strict or any(isinstance(v.node, ast.Call) for v in values)
        if len(values) == 1 and depth < 3 and followed:
            try:
                return self._value(values[0].node, values[0], depth + 1)
            except _UnknownError:
                if self.strict:
                    raise
        name = last_part(node.func if isinstance(node, ast.Call) else node).lower()
        if self._is_rank(node, site):
            first = "main" in name or "master" in name or "zero" in name or name.endswith("0")
            return self.rank == 0 if first else self.rank
        if not self.strict and _WORLD_SIZE.fullmatch(name):
            return self.size
        raise _UnknownError

    def _is_rank(self, node: ast.expr, site: Site) -> bool:
        notebook, inside = self.notebook, site.frame.function
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(node, ast.Call) and notebook.full(function, site) in RANK_CALLS:
            return not self.strict or notebook.sites.is_certain(function, site.scope)
        if inside and isinstance(node, ast.Name) and node.id == notebook.rank_parameter(inside):
            bindings = inside.scope.bindings[node.id]
            return not (self.strict and any(isinstance(one.node, ast.Name) for one in bindings))
        return not self.strict and RANKS.fullmatch(last_part(function).lower()) is not None
