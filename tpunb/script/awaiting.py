"""`await` outside functions, which a notebook allows and a script does not.

It becomes `_await(lambda: …)` in its place: the lambda is called while the script's own event
loop runs, so what it makes may need a running loop. `async for`, `async with` and asynchronous
comprehensions are refused: `async with` must be entered and left in one task (a time-out, a task
group), which no line-for-line form does. Nothing else runs between two `await`s, whereas in a
notebook tasks go on between cells.
"""

from __future__ import annotations

import ast

from tpunb.script import statements

HELPER = "_await"


def written_out(source: str, tree: ast.Module) -> str:
    """A cell with calls of `_await` for what it awaits outside functions."""
    found = [node for node in statements.executed(tree) if isinstance(node, ast.Await)]
    marks: list[tuple[int, int, str, int]] = []
    for node in found:
        if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node)):
            continue  # the lambda would keep the name; compiling will refuse the cell
        assert node.end_lineno is not None and node.end_col_offset is not None
        # A loop that runs cannot be waited for, so what awaits others is made before it runs.
        nested = sum(isinstance(part, ast.Await) for part in ast.walk(node)) > 1
        begin = f"{HELPER}(" if nested else f"{HELPER}(lambda: "
        marks.append((node.lineno, node.col_offset, begin, len("await")))
        marks.append((node.end_lineno, node.end_col_offset, ")", 0))
    lines = [line.encode() for line in source.split("\n")]
    # Columns count bytes of UTF-8. What ends later in a line is put in first; at one place the
    # inner one of two ends comes first, and makes no difference.
    for line, column, text, taken in sorted(marks, reverse=True):
        row = lines[line - 1]
        rest = row[column + taken :].lstrip() if taken else row[column:]
        lines[line - 1] = row[:column] + text.encode() + rest
    return b"\n".join(lines).decode()
