"""Commenting out statements, with a comment that gives the reason."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from tpunb.notebook.migrate.cell import CodeCell
from tpunb.notebook.migrate.names import NotebookNames


@dataclass
class Removals:
    """Statements to comment out. They are collected first, so that other rewriters skip them."""

    names: NotebookNames
    _advice: dict[cst.CSTNode, str] = field(default_factory=dict)

    def add(self, statement: cst.CSTNode, advice: str) -> None:
        """Register a statement line, a compound statement or a small statement."""
        self._advice.setdefault(statement, advice)

    def __contains__(self, node: cst.CSTNode) -> bool:
        """Whether a node is part of a statement that is to be commented out."""
        while node is not self.names.module:
            if node in self._advice:
                return True
            node = self.names.parents[node]
        return False

    def apply(self) -> None:
        """Make the edits, in the order of the text."""
        ended: dict[int, tuple[int, str]] = {}
        for cell, node in self.names.walk():
            advice = self._advice.get(node)
            if advice is None:
                continue
            if isinstance(node, cst.BaseSmallStatement):
                self._take_out(cell, node, advice)
                continue
            first, last = self._extent(cell, node)
            last_line, last_advice = ended.get(cell.index, (-1, ""))
            between = "".join(cell.lines[last_line + 1 : first]).strip()
            if last_advice == advice and not between:
                cell.note(first, "commented out, as above")
            else:
                cell.mark(first, advice, report=False)
                cell.note(first, f"commented out: {advice}")
            cell.comment_out(first, last)
            ended[cell.index] = (last, advice)
            self._fill(cell, node, last)

    def _extent(self, cell: CodeCell, node: cst.CSTNode) -> tuple[int, int]:
        first = self.names.line(node)
        special = cell.specials.get(first)
        if special is not None:
            return first, first + special.count - 1
        end = cell.positions[node].end
        last = end.line - 1 if end.column else end.line - 2
        return first, max(first, last)

    def _fill(self, cell: CodeCell, node: cst.CSTNode, last: int) -> None:
        """Put `pass` into a block that has no statements left."""
        block = self.names.parents[node]
        if (
            isinstance(block, cst.IndentedBlock)
            and block.body[-1] is node
            and all(statement in self._advice for statement in block.body)
        ):
            cell.insert_below(last, "pass", cell.indent(self.names.line(node)))

    def _take_out(self, cell: CodeCell, node: cst.BaseSmallStatement, advice: str) -> None:
        """Remove one of several statements on a line."""
        line = cell.line_of(node)
        parent = self.names.parents[node]
        assert isinstance(parent, (cst.SimpleStatementLine, cst.SimpleStatementSuite))
        body = list(parent.body)
        at = body.index(node)
        start, end = cell.span(node)
        text = cell.text[start:end]
        if len(body) == 1:
            cell.replace(start, end, "pass")
        elif at:
            cell.replace(cell.span(body[at - 1])[1], end, "")
        else:
            cell.replace(start, cell.span(body[1])[0], "")
        cell.mark(line, f"taken out: `{text}`. {advice}", report=False)
        cell.note(line, f"taken out: {advice}", before=text)

    def remove(self, node: cst.CSTNode, advice: str) -> None:
        """Remove the smallest statement around a node, or comment it out."""
        while not isinstance(node, cst.BaseSmallStatement):
            node = self.names.parents[node]
        line = self.names.parents[node]
        alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        self.add(line if alone else node, advice)
