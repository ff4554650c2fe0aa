"""Names and source text of the notebook's lines, and the statements around them."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.diagnostics.cell.frames import SourceLine

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.comprehension)


_debugged: dict[str, int] = {}


def remember_cell(name: str, number: int) -> None:
    """Record the name under which a cell of %%tpu_debug was compiled."""
    _debugged[name] = number


def cell_files(shell: InteractiveShell) -> Mapping[str, int]:
    """The names under which IPython compiled cells, with the cells' numbers.

    `_filename_map` is private, and exists in IPython 8 to 9.18. Older releases, as on Colab,
    compute the same name again from the cells of their history.
    """
    known: Mapping[str, int] | None = getattr(shell.compile, "_filename_map", None)
    if known is not None:
        return known
    history: Any = shell.history_manager
    ran = zip(history.input_hist_raw, history.input_hist_parsed, strict=False)
    name = shell.compile.get_code_name
    return {name(raw, code, n): n for n, (raw, code) in enumerate(ran) if raw} | _debugged


class Places:
    """The cells that this kernel has compiled."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.files = cell_files(shell)
        self._trees: dict[str, ast.Module | None] = {}

    def name(self, place: SourceLine) -> str:
        """'cell [3], line 12'."""
        return f"cell [{self.files[place.file]}], line {place.line}"

    def source(self, place: SourceLine) -> str:
        return linecache.getline(place.file, place.line).strip()

    def branch(self, place: SourceLine) -> SourceLine | None:
        """The innermost condition or loop that decides whether a line runs."""
        tree = self._tree(place.file)
        best: SourceLine | None = None
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, _BRANCHES) or isinstance(node, ast.comprehension):
                continue
            body: Any = node.body
            parts = [*(body if isinstance(body, list) else [body]), *_others(node)]
            inside = any(part.lineno <= place.line <= (part.end_lineno or 0) for part in parts)
            if inside and (best is None or node.lineno >= best.line):
                best = SourceLine(place.file, node.lineno)
        return best

    def _tree(self, file: str) -> ast.Module | None:
        if file not in self._trees:
            lines = linecache.getlines(file)
            text = "".join("\n" if line.startswith("%%") else line for line in lines)
            try:
                self._trees[file] = ast.parse(text)
            except SyntaxError:
                self._trees[file] = None
        return self._trees[file]


def _others(node: ast.AST) -> list[ast.AST]:
    orelse = getattr(node, "orelse", [])
    return orelse if isinstance(orelse, list) else [orelse]
