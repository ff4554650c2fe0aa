"""Lets cells run a second time: what was done once in the kernel is no error in the run.

A run executes the cells above the train cell again, with the environment and the files that they
left. Then `os.mkdir("out")` finds its folder, and `os.remove("data.zip")` finds no file. The call
certainly succeeded in the kernel, because a cell that failed there is not part of a run. So if such
a call is a statement of its own, and the cells do not handle its error themselves, the run
continues with the next statement. A call whose value is used still fails: its value is unknown.
"""

from __future__ import annotations

import ast
import re

_ERRORS = {
    **dict.fromkeys(
        "mkdir makedirs symlink symlink_to link hardlink_to mkfifo mknod copytree".split(),
        "FileExistsError",
    ),
    **dict.fromkeys(
        "remove unlink rmdir removedirs rmtree rename renames replace move".split(),
        "FileNotFoundError",
    ),
}
"""Functions of os, shutil or pathlib, with the error that they raise if it is done already."""
_WORDS = re.compile(rf"\b({'|'.join(_ERRORS)}|environ)\b")

_active = False


def begin_cell(*, prelude: bool) -> None:
    """Set whether the code that follows has run in the kernel before (`prelude`)."""
    global _active
    _active = prelude


def reraise_unless_replayed() -> None:
    """In an exception handler: raise the error again if the code has not run in the kernel."""
    if not _active:
        raise


def may_change(source: str) -> bool:
    """True if `tolerate_repetition` may change the tree of a cell."""
    return _WORDS.search(source) is not None


def tolerate_repetition(tree: ast.Module) -> ast.Module:
    """Change the cell's tree so that statements that succeed only once may be repeated."""
    _Tolerance().visit(tree)
    return ast.fix_missing_locations(tree)


class _Tolerance(ast.NodeTransformer):
    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Leave the body of a try with handlers unchanged: they may be for this very error."""
        body = node.body
        if node.handlers:
            node.body = []
        self.generic_visit(node)
        node.body = node.body or body
        return node

    visit_TryStar = visit_Try  # type: ignore[assignment]  # noqa: N815

    def visit_With(self, node: ast.With) -> ast.AST:
        if any("suppress" in ast.unparse(item.context_expr) for item in node.items):
            return node
        return self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if not isinstance(call, ast.Call):
            return node
        name = _last_part(call.func)
        if name in _ERRORS:
            return _handled(node, _ERRORS[name])
        taken = isinstance(call.func, ast.Attribute) and _last_part(call.func.value) == "environ"
        if taken and name == "pop" and len(call.args) == 1:
            return _handled(node, "KeyError")
        return node

    def visit_Delete(self, node: ast.Delete) -> ast.AST | list[ast.AST]:
        if not any(_is_variable(target) for target in node.targets):
            return node
        each = [ast.copy_location(ast.Delete([target]), node) for target in node.targets]
        return [_handled(one, "KeyError") if _is_variable(one.targets[0]) else one for one in each]


def _is_variable(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and _last_part(node.value) == "environ"


def _last_part(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _handled(statement: ast.stmt, error: str) -> ast.Try:
    """`try: statement`, with a handler that decides at run time."""
    [handled] = ast.parse(
        f"try: pass\nexcept __import__('builtins').{error}:\n"
        f"    __import__({__name__!r}, fromlist=['_']).reraise_unless_replayed()"
    ).body
    assert isinstance(handled, ast.Try)
    for node in ast.walk(handled):
        ast.copy_location(node, statement)
    handled.body = [statement]
    return handled
