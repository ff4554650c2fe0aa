"""What plain Python asks of the notebook's front end, or of the person before it.

It happened once, in the notebook: a mounted drive is mounted, a token that was put into the
environment is there. In a rank there is nobody to ask.
"""

from __future__ import annotations

import ast
import os.path
import re
from collections.abc import Iterator
from typing import NamedTuple

from tpunb.errors import ConversionError
from tpunb.script import compiling, hoist, statements, treatments
from tpunb.script.leaving import Cell

DONE = "it was done in the notebook"
IMPORT = "nothing that runs here needs it"

COLAB = "google.colab"
MODULES = ("auth", "data_table", "drive", "files", "output", "runtime", "userdata")
"""Modules of google.colab that talk to the front end (colabtools of 2026)."""
ASKING = {
    "input",
    "getpass.getpass",
    "huggingface_hub.interpreter_login",
    "huggingface_hub.login",
    "huggingface_hub.notebook_login",
    "kagglehub.login",
}
"""Other functions that ask the person. The logins keep what they got in a file."""

_ASSIGN = (
    "assign the value, or put it into os.environ in a cell tagged tpu-skip (a run has the "
    "kernel's environment)"
)
_WORDS = re.compile(r"google\.colab|\bchdir\b|\binput\s*\(|getpass|login\s*\(")


class Statement(NamedTuple):
    """A statement that does not run, and the names that are missing without it."""

    node: ast.stmt
    reason: str
    names: tuple[str, ...] = ()


def concerns(source: str) -> bool:
    """Whether a cell may hold anything of this; quick."""
    return _WORDS.search(source) is not None


class FrontEnd:
    """The names by which the cells of a run know what talks to the front end."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self.known = {"input": "input"}
        self.colab: set[str] = set()
        nodes = [node for tree in trees for node in ast.walk(tree)]
        for node in nodes:
            for name, full in _imported(node):
                self.known[name] = full
                if full.startswith(f"{COLAB}."):
                    self.colab.add(name)
        if any("input" in statements.bound(tree) for tree in trees):
            del self.known["input"]
        dropped = {id(one.node) for tree in trees for one in self._calls(tree)}
        inside = {id(part) for node in nodes if id(node) in dropped for part in ast.walk(node)}
        self.needed = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and id(node) not in inside
            and not isinstance(node.ctx, ast.Store)
        }  # fmt: skip

    def leave_out(self, cell: Cell, tree: ast.Module, prelude: bool) -> None:
        """Leave out of a cell what asks the front end, and imports that are of no use then."""
        found = [*self._calls(tree), *self._imports(tree)]
        if prelude:
            found += self._directories(tree)
        start = len(cell.left_out)
        for one in sorted(found, key=lambda one: (one.node.lineno, one.node.col_offset))[::-1]:
            first, last = one.node.lineno - 1, one.node.end_lineno or one.node.lineno
            text = cell.lines[first]
            cell.lose(first + 1, text, one.names)
            if hoist.alone(cell.lines, one.node):
                cell.drop(first, last - first, one.reason)
            else:
                shown = ast.unparse(one.node)
                cell.left_out.append((first + 1, shown, one.reason))
                hoist.take_away(cell.lines, one.node)
        cell.left_out[start:] = cell.left_out[start:][::-1]

    def refuse(self, source: str, number: int) -> None:
        """Raise ConversionError for what asks and is still there, if it is certain to run."""
        if not concerns(source):
            return
        for node in statements.unconditional(compiling.parsed(source, number)):
            if isinstance(node, ast.Call) and self.asks(node):
                what = f"{ast.unparse(node.func)}() has nobody to ask in a run"
                line = source.split("\n")[node.lineno - 1]
                reason = f"{what}: {_ASSIGN}, {compiling.SKIP}"
                raise ConversionError(reason, number, node.lineno, line)

    def dotted(self, node: ast.AST) -> str:
        """The full name of what is called: 'google.colab.drive.mount'."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, "")
        if isinstance(node, ast.Attribute):
            left = self.dotted(node.value)
            return f"{left}.{node.attr}" if left else ""
        return ""

    def asks(self, node: ast.AST | None) -> bool:
        """Whether it is a call that asks the front end or the person."""
        if not isinstance(node, ast.Call):
            return False
        name = self.dotted(node.func)
        module = name.removeprefix(f"{COLAB}.").partition(".")[0]
        return name in ASKING or (name.startswith(f"{COLAB}.") and module in MODULES)

    def _calls(self, tree: ast.Module) -> Iterator[Statement]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and self.asks(node.value):
                assert isinstance(node.value, ast.Call)
                if self.dotted(node.value.func) not in ("input", "getpass.getpass"):
                    yield Statement(node, DONE)
            elif isinstance(node, ast.Assign) and self.asks(node.value):
                assert isinstance(node.value, ast.Call)
                target = node.targets[0]
                if self._is_environment(target):
                    yield Statement(node, treatments.STATE)
                elif isinstance(target, ast.Name) and self.dotted(node.value.func).startswith(
                    COLAB
                ):
                    yield Statement(node, DONE, (target.id,))

    def _is_environment(self, target: ast.expr) -> bool:
        return isinstance(target, ast.Subscript) and self.dotted(target.value) == "os.environ"

    def _imports(self, tree: ast.Module) -> Iterator[Statement]:
        tried = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for part in ast.walk(node)
        }
        for node in ast.walk(tree):
            names = list(_imported(node))
            if not isinstance(node, ast.Import | ast.ImportFrom) or id(node) in tried:
                continue  # where it is tried, it finds out whether this is Colab
            if len(names) == len(node.names) and all(
                name in self.colab
                and name not in self.needed
                and full.removeprefix(f"{COLAB}.").partition(".")[0] in MODULES
                for name, full in names
            ):
                yield Statement(node, IMPORT)

    def _directories(self, tree: ast.Module) -> Iterator[Statement]:
        """`os.chdir("data")`: it would go from where it went in the notebook."""
        for node in tree.body:
            if not isinstance(node, ast.Expr) or not isinstance(call := node.value, ast.Call):
                continue
            if self.dotted(call.func) != "os.chdir" or len(call.args) != 1:
                continue
            path = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
            if isinstance(path, str) and not os.path.isabs(path):
                yield Statement(node, treatments.STATE)


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Name in the cell, and full name, of what an import brings."""
    if isinstance(node, ast.Import):
        for one in node.names:
            top = one.name.partition(".")[0]
            yield one.asname or top, one.name if one.asname else top
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for one in node.names:
            yield one.asname or one.name, f"{node.module}.{one.name}"
