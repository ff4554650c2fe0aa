"""Commenting out statements, with a comment that gives the reason."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from tpunb.notebook.migrate.cell import CodeCell, last_line_of, line_of
from tpunb.notebook.migrate.names import NotebookNames


@dataclass
class Removals:
    """Statements to comment out. They are collected first, so that other rewriters skip them."""

    names: NotebookNames
    _advice: dict[ast.stmt, str] = field(default_factory=dict)

    def add(self, node: ast.AST, advice: str) -> None:
        """Register the innermost statement around a node."""
        self._advice.setdefault(self.names.statement(node), advice)

    def __contains__(self, node: ast.AST) -> bool:
        """Whether a node is part of a statement that is to be commented out."""
        while not isinstance(node, ast.Module):
            if node in self._advice:
                return True
            node = self.names.parents[node]
        return False

    def apply(self) -> None:
        """Make the edits, in the order of the text."""
        ended: dict[int, tuple[int, str]] = {}
        done: set[ast.stmt] = set()
        for cell, node in self.names.walk():
            if not isinstance(node, ast.stmt) or node not in self._advice or node in done:
                continue
            advice = self._advice[node]
            line = self.names.same_line(node)
            first = self.names.line(node)
            if not cell.begins_line(line[0]) or not self._advice.keys() >= set(line):
                self._take_out(cell, node, advice, line)
                continue
            done.update(line)
            last = last_line_of(line[-1])
            if (special := cell.specials.get(first)) is not None:
                last = first + special.count - 1
            last_line, last_advice = ended.get(cell.index, (-1, ""))
            between = "".join(cell.lines[last_line + 1 : first]).strip()
            if last_advice == advice and not between:
                cell.note(first, "commented out, as above")
            else:
                cell.mark(first, advice, report=False)
                cell.note(first, f"commented out: {advice}")
            cell.comment_out(first, last)
            ended[cell.index] = (last, advice)
            block = self.names.block(node)
            inside = not isinstance(self.names.parents[node], ast.Module)
            if inside and block[-1] is line[-1] and self._advice.keys() >= set(block):
                cell.insert_below(last, "pass", cell.indent(first))

    def _take_out(self, cell: CodeCell, node: ast.stmt, advice: str, line: list[ast.stmt]) -> None:
        """Remove one of several statements on a line."""
        at = line.index(node)
        start, end = cell.bare_span(node)
        text = cell.text[start:end]
        kept = [other for other in line if other not in self._advice]
        if not kept:
            cell.replace(start, end, "pass")
        elif at + 1 < len(line):
            cell.replace(start, cell.bare_span(line[at + 1])[0], "")
        else:
            cell.replace(cell.bare_span(kept[-1])[1], end, "")
        first = self.names.line(node)
        cell.mark(first, f"taken out: `{text}`. {advice}", report=False)
        cell.note(line_of(node), f"taken out: {advice}", before=text)
