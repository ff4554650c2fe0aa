"""Leave out calls that need the notebook's front end or the user: mounts, logins, `input()`.

They were made once, in the notebook: a mounted drive stays mounted, a token in the environment is
inherited. A rank has no user to ask.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook.convert import statements
from tpunb.notebook.convert.cells import EditedCell, LeftOutStatement
from tpunb.notebook.errors import ConversionError
from tpunb.notebook.models import LeftOut
from tpunb.notebook.scopes import imported, mentions, scopes_of
from tpunb.utils.errors import NO_INPUT

COLAB = "google.colab"
MODULES = ("auth", "data_table", "drive", "files", "output", "runtime", "userdata")
"""Modules of google.colab that communicate with the front end (colabtools of 2026)."""
ASKING = {
    "input",
    "getpass.getpass",
    "huggingface_hub.interpreter_login",
    "huggingface_hub.login",
    "huggingface_hub.notebook_login",
    "kagglehub.login",
}
"""Other functions that ask the user. The logins save their token in a file."""

_WORDS = re.compile(r"google\.colab|\binput\s*\(|getpass|login\s*\(")


def mentions_front_end(source: str) -> bool:
    """Quick textual test for cells that may call the front end."""
    return mentions(_WORDS, source)


class FrontEndNames:
    """Names under which the cells of a run use functions of the front end."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self._scopes = scopes_of(*trees)
        nodes = [node for tree in trees for node in ast.walk(tree)]
        dropped = {id(call.node) for tree in trees for call in self._calls(tree)}
        inside = {id(part) for node in nodes if id(node) in dropped for part in ast.walk(node)}
        self.needed = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name)
            and id(node) not in inside
            and not isinstance(node.ctx, ast.Store)
        }

    def leave_out(self, cell: EditedCell, tree: ast.Module) -> None:
        """Leave a cell's calls to the front end out, and imports that only these calls need."""
        cell.leave_out([*self._calls(tree), *self._imports(tree)])

    def refuse(self, source: str, number: int) -> None:
        """Raise ConversionError for a remaining call that is certain to run."""
        if not mentions_front_end(source):
            return
        for site in scopes_of(statements.parse_cell(source, number)).calls:
            node = site.call
            if site.ends_cell() and self.asks(node):
                line = source.split("\n")[node.lineno - 1]
                reason = f"{ast.unparse(node.func)}() {NO_INPUT}, {statements.SKIP}"
                raise ConversionError(reason, number, node.lineno, line)

    def dotted(self, node: ast.AST) -> str:
        """Full name of a called function: 'google.colab.drive.mount'; '' if unknown."""
        scopes = self._scopes
        return scopes.full(node, scopes.scopes.get(node, scopes.globals))

    def asks(self, call: ast.Call) -> bool:
        """True for a call that needs the front end or the user."""
        name = self.dotted(call.func)
        return name in ASKING or _is_front_end(name)

    def _calls(self, tree: ast.Module) -> Iterator[LeftOutStatement]:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Expr | ast.Assign):
                continue
            if not isinstance(call := node.value, ast.Call) or not self.asks(call):
                continue
            name = self.dotted(call.func)
            if isinstance(node, ast.Expr):
                if name not in ("input", "getpass.getpass"):
                    yield LeftOutStatement(node, LeftOut.DONE)
            elif self._is_environment(target := node.targets[0]):
                yield LeftOutStatement(node, LeftOut.KERNEL_STATE)
            elif isinstance(target, ast.Name) and name.startswith(COLAB):
                yield LeftOutStatement(node, LeftOut.DONE, (target.id,))

    def _is_environment(self, target: ast.expr) -> bool:
        return isinstance(target, ast.Subscript) and self.dotted(target.value) == "os.environ"

    def _imports(self, tree: ast.Module) -> Iterator[LeftOutStatement]:
        tried = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for part in ast.walk(node)
        }
        for node in ast.walk(tree):
            names = list(imported(node))
            if not isinstance(node, ast.Import | ast.ImportFrom) or id(node) in tried:
                continue  # an import in a `try` tests whether this is Colab
            if len(names) == len(node.names) and all(
                name not in self.needed and _is_front_end(full) for name, full in names
            ):
                yield LeftOutStatement(node, LeftOut.UNUSED_IMPORT)


def _is_front_end(name: str) -> bool:
    """True for a module of google.colab that communicates with the front end, or a name in it."""
    return name.startswith(f"{COLAB}.") and name.split(".")[2] in MODULES
