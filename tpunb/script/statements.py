"""What runs when a cell runs: its statements, but not the bodies of functions it defines."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below `node` that run with it, in order of the source.

    Bodies of functions and lambdas do not; their decorators and defaults, and bodies of
    classes, do.
    """
    todo = list(ast.iter_child_nodes(node))[::-1]
    while todo:
        child = todo.pop()
        yield child
        if isinstance(child, Function):
            defaults = [part for part in child.args.kw_defaults if part is not None]
            todo += [*child.decorator_list, *child.args.defaults, *defaults][::-1]
        elif not isinstance(child, ast.Lambda):
            todo += list(ast.iter_child_nodes(child))[::-1]


def unconditional(tree: ast.Module) -> Iterator[ast.AST]:
    """As `executed`, without what stands below `if`, loops, `try` and the like."""
    simple = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.With, ast.Return)
    for statement in tree.body:
        if isinstance(statement, simple):
            yield from executed(statement)


def bound(tree: ast.AST) -> set[str]:
    """All names that are assigned, imported or defined anywhere in a cell."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def used(tree: ast.AST) -> set[str]:
    """All names that are read anywhere in a cell."""
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
