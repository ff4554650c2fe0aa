"""Which names a piece of code makes where it stands.

Not with `symtable`: since Python 3.12 its tables mix the names of comprehensions with those
around them, and before they do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from tpunb.script.statements import Function

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FunctionOrClass = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Stores:
    """Names that are bound in one scope."""

    names: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    """Declared `global`, here or in a function below."""
    changed: set[str] = field(default_factory=set)
    """Of `x += 1`, which makes a name local to a function, but needs it to be there."""
    outer: set[str] = field(default_factory=set)
    """Declared `nonlocal`."""
    stars: bool = False
    """Whether there is an `import *`."""


def stores(nodes: Iterable[ast.AST]) -> Stores:
    """What the nodes bind where they stand; bodies of functions and classes are their own."""
    found = Stores()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.changed.add(node.target.id)
            todo.append(node.value)
            continue
        _store(node, found)
        if isinstance(node, FunctionOrClass):
            _inside(node, found)
            todo += node.decorator_list
        elif isinstance(node, ast.Lambda):
            _inside(node, found)
        elif isinstance(node, COMPREHENSIONS):
            # `:=` in a comprehension binds around it.
            todo += [one for one in ast.walk(node) if isinstance(one, ast.NamedExpr)]
        else:
            todo += ast.iter_child_nodes(node)
    return found


def made(tree: ast.AST) -> set[str]:
    """The names that a cell makes in the notebook; what `import *` brings is not known."""
    found = stores(ast.iter_child_nodes(tree))
    return found.names | found.globals


def parameters(function: Function | ast.Lambda) -> set[str]:
    """The names of a function's parameters."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {one.arg for one in every if one is not None}


def _inside(node: ast.AST, found: Stores) -> None:
    """The `global` statements anywhere in a scope below."""
    for one in ast.walk(node):
        if isinstance(one, ast.Global):
            found.globals.update(one.names)


def _store(node: ast.AST, found: Stores) -> None:
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            found.names.add(node.id)
    elif isinstance(node, FunctionOrClass):
        found.names.add(node.name)
    elif isinstance(node, ast.alias):
        found.stars |= node.name == "*"
        found.names.add(node.asname or node.name.partition(".")[0])
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        found.names |= {node.name} if node.name else set()
    elif isinstance(node, ast.MatchMapping):
        found.names |= {node.rest} if node.rest else set()
    elif isinstance(node, ast.Global):
        found.globals.update(node.names)
    elif isinstance(node, ast.Nonlocal):
        found.outer.update(node.names)
