"""`with torch_xla.step():` → its block, one level further out."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence

from tpunb.notebook.migrate.cell import CodeCell, last_line_of, line_of
from tpunb.notebook.migrate.names import NotebookNames

STEP = "torch_xla.step"


def unindent_steps(cells: Sequence[CodeCell]) -> tuple[list[CodeCell], dict[int, list[int]]]:
    """Move the blocks of `with torch_xla.step():` out.

    The lines of the `with` become empty, so that all lines keep their numbers; they are returned
    by cell. A block with a string of several lines stays as it is.
    """
    names = NotebookNames(cells)
    empty: dict[int, list[int]] = {}
    texts = {cell.index: list(cell.lines) for cell in cells}
    for cell, node in names.walk():
        if not isinstance(node, ast.With) or len(node.items) != 1:
            continue
        called = node.items[0].context_expr
        if not isinstance(called, ast.Call) or names.full_names(called.func) != {STEP}:
            continue
        first, last = last_line_of(called) + 1, last_line_of(node)
        if line_of(node.body[0]) < first or not names.is_alone(node):
            continue
        if _has_long_string(cell, first, last):
            continue
        lines = texts[cell.index]
        width = len(cell.indent(line_of(node.body[0]))) - len(cell.indent(line_of(node)))
        for line in range(line_of(node), first):
            lines[line] = ""
            empty.setdefault(cell.index, []).append(line)
        for line in range(first, last + 1):
            lines[line] = lines[line][min(width, len(cell.indent(line))) :]
    return [
        CodeCell(cell.index, "\n".join(texts[cell.index])) if cell.index in empty else cell
        for cell in cells
    ], empty


def _has_long_string(cell: CodeCell, first: int, last: int) -> bool:
    text = "\n".join(cell.lines[first : last + 1])
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError):
        return '"""' in text or "'''" in text
    return (
        any(
            token.start[0] != token.end[0]
            for token in tokens
            if token.type == tokenize.STRING or "FSTRING" in tokenize.tok_name[token.type]
        )
        or '"""' in text
        or "'''" in text
    )
