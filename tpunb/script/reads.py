"""Which global names a piece of code is certain to read when it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tpunb.script import scopes, statements
from tpunb.script.statements import Function

Hidden = frozenset[str]
"""Names that belong to a function, class or comprehension around."""


def certain(body: Sequence[ast.stmt], hidden: Hidden = frozenset()) -> Iterator[ast.expr]:
    """Names that are read, and attributes of names, in order of the source.

    Bodies of loops are taken to run; branches, code whose errors are handled, and what stands
    below a way out are not. Bodies of functions run when they are called, so not here.
    """
    for statement in body:
        yield from _of(statement, hidden)
        if _may_leave(statement):
            return


def in_function(function: Function) -> Iterator[ast.expr]:
    """The same for what runs when a function of the module is called."""
    found = scopes.stores(function.body)
    own = (scopes.parameters(function) | found.names | found.changed | found.outer) - _declared(
        function
    )
    yield from certain(function.body, frozenset(own))


def _may_leave(statement: ast.stmt) -> bool:
    """Whether what stands below a statement may not be reached."""
    if isinstance(statement, scopes.FunctionOrClass):
        return False
    ways: tuple[type[ast.stmt], ...] = (ast.Return, ast.Raise)
    if not isinstance(statement, ast.For | ast.AsyncFor | ast.While):
        ways += (ast.Break, ast.Continue)
    return isinstance(statement, ways) or any(
        isinstance(node, ways) for node in statements.executed(statement)
    )


def _declared(function: Function) -> set[str]:
    return {
        name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names
    }


def _of(node: ast.AST, hidden: Hidden) -> Iterator[ast.expr]:
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in hidden:
            yield node
    elif isinstance(node, ast.Attribute):
        yield from _of(node.value, hidden)
        if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            yield from () if node.value.id in hidden else (node,)
    elif isinstance(node, scopes.COMPREHENSIONS):
        yield from _of_comprehension(node, hidden)
    elif isinstance(node, ast.ClassDef):
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            yield from _of(part, hidden)
        yield from certain(node.body, hidden | scopes.stores(node.body).names)
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            yield from _of(item, hidden)
        if not any("suppress" in ast.unparse(item.context_expr) for item in node.items):
            yield from certain(node.body, hidden)
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield from _of(node.iter, hidden)
        yield from certain(node.body, hidden)
    elif isinstance(node, ast.While):
        yield from _of(node.test, hidden)
        yield from certain(node.body, hidden)
    elif isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Name) and node.target.id not in hidden:
            yield node.target
        yield from _of(node.value, hidden)
    else:
        for part in _parts(node):
            yield from _of(part, hidden)


def _of_comprehension(node: ast.AST, hidden: Hidden) -> Iterator[ast.expr]:
    assert isinstance(node, scopes.COMPREHENSIONS)
    first = node.generators[0]
    yield from _of(first.iter, hidden)
    inner = hidden | scopes.stores([one.target for one in node.generators]).names
    for one in node.generators:
        if one is not first:
            yield from _of(one.iter, inner)
        if one.ifs:
            yield from _of(one.ifs[0], inner)
            return
    values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    for value in values:
        yield from _of(value, inner)


def _parts(node: ast.AST) -> Sequence[ast.AST]:
    """The parts of any other node that are certain to run with it."""
    if isinstance(node, Function):
        defaults = [part for part in node.args.kw_defaults if part is not None]
        return [*node.decorator_list, *node.args.defaults, *defaults]
    if isinstance(node, ast.Lambda):
        return [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    if isinstance(node, ast.If):
        return [node.test, *(node.body if _is_main(node.test) else ())]
    if isinstance(node, ast.IfExp | ast.Assert):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values[:1]
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators[:1]]
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.AnnAssign):
        return [node.target, *([node.value] if node.value else ())]
    if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":  # new in Python 3.11
        return [*([] if node.handlers else node.body), *node.finalbody]  # type: ignore[attr-defined]
    return list(ast.iter_child_nodes(node))


def _is_main(test: ast.expr) -> bool:
    return ast.unparse(test) == "__name__ == '__main__'"
