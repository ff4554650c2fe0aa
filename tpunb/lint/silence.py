"""Comments that silence findings: `# tpunb: ignore[rule, rule]`, or `# tpunb: ignore` for all.

At the end of a line it counts for that line, and on the first line of a statement for the whole
statement; alone on a line above the cell's first statement it counts for the cell.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field

from tpunb.lint.pages import Page

MARK = re.compile(r"#\s*tpunb:\s*ignore(?:\[([^\]]*)\])?")
Rules = frozenset[str]
ALL: Rules = frozenset("*")


@dataclass
class Silence:
    """What is silenced in one cell."""

    cell: Rules = frozenset()
    lines: dict[int, Rules] = field(default_factory=dict)
    named: list[tuple[int, str]] = field(default_factory=list)
    """Each rule that is named, with its line."""

    def covers(self, rule: str, line: int) -> bool:
        """Whether a finding of a rule in a line is silenced."""
        rules = self.cell | self.lines.get(line, frozenset())
        return "*" in rules or rule in rules


def read(page: Page) -> Silence:
    """The comments of a cell."""
    silence = Silence()
    if not any("tpunb:" in line for line in page.lines):
        return silence
    top = min((node.lineno for node in page.tree.body), default=len(page.lines) + 1)
    found: dict[int, Rules] = {}
    for line, alone, comment in _comments(page):
        match = MARK.search(comment)
        if match is None:
            continue
        names = [name.strip() for name in (match[1] or "").split(",") if name.strip()]
        silence.named += [(line, name) for name in names]
        rules = frozenset(names) if match[1] is not None else ALL
        if alone and line < top:
            silence.cell |= rules
        else:
            found[line] = found.get(line, frozenset()) | rules
    for line, rules in found.items():
        for covered in _statement(page.tree, line):
            silence.lines[covered] = silence.lines.get(covered, frozenset()) | rules
    return silence


def _comments(page: Page) -> Iterator[tuple[int, bool, str]]:
    """Line, whether it is alone on it, and text of each comment, also behind magics."""
    lines = list(page.lines)
    for line in page.left_out:
        text = lines[line - 1]
        if (at := text.find("# tpunb:")) >= 0:
            yield line, False, text[at:]
        lines[line - 1] = ""
        if text.startswith("%%"):
            lines[line:] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
            if token.type == tokenize.COMMENT:
                alone = not token.line[: token.start[1]].strip()
                yield token.start[0], alone, token.string
    except (tokenize.TokenError, SyntaxError):
        return  # not Python: what was read up to here counts


def _statement(tree: ast.Module, line: int) -> range:
    """The lines that a comment in a line speaks for: the statement that begins there (of one
    with a block its head), else the line.
    """
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                if child.lineno == line:
                    block = getattr(child, "body", None)
                    end = block[0].lineno - 1 if block else child.end_lineno or line
                    return range(line, max(end, line) + 1)
                if child.lineno < line <= (child.end_lineno or line):
                    todo.append(child)
            elif isinstance(child, ast.match_case):
                todo.append(child)
    return range(line, line + 1)
