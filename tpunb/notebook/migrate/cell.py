"""A code cell: its text, the Python that LibCST parses in its place, and edits to the text.

LibCST is used to find and resolve names; the edits are spans of the cell's own text. Everything
else, including magics and shell lines, therefore stays exactly as it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import libcst as cst
from libcst.metadata import (
    CodeRange,
    MetadataWrapper,
    PositionProvider,
    WhitespaceInclusivePositionProvider,
)

from tpunb.notebook.convert import syntax
from tpunb.notebook.convert.syntax import Special
from tpunb.notebook.migrate.report import MARK, Change, Kind

PYTHON_BODY = frozenset(("time", "timeit", "capture", "prun", "tpu_train", "tpu_debug"))
"""Cell magics whose body is Python of the notebook."""
SHELL_BODY = frozenset(("bash", "sh", "!", "system", "sx"))
"""Cell magics whose body is a shell script."""
PAYLOAD = frozenset(("time", "timeit"))
"""Line magics whose name is followed by a Python statement."""


@dataclass
class CodeCell:
    """A code cell under migration."""

    index: int
    text: str
    module: cst.Module | None = None
    """None if the cell is not Python, or is a cell magic whose body is not Python."""
    shell: bool = False
    """True if the body is a shell script."""
    file: bool = False
    """True if the body is a Python module that the cell writes: a separate program."""
    specials: dict[int, Special] = field(default_factory=dict)
    """Magics and shell lines, keyed by their first line, from 0."""
    changes: list[Change] = field(default_factory=list)
    _shift: dict[int, int] = field(default_factory=dict)
    _spans: list[tuple[int, int, int, str]] = field(default_factory=list)
    _commented_out: set[int] = field(default_factory=set)
    _last_line_is_deleted: bool = False
    _starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = self.text.split("\n")
        offset = 0
        for line in self.lines:
            self._starts.append(offset)
            offset += len(line) + 1
        self._parse()

    # Reading

    def _parse(self) -> None:
        if "\r" in self.text:
            self._skip("it has carriage returns")
            return
        lines = list(self.lines)
        top = -1
        while (top := syntax.next_statement(lines, top + 1)) < len(lines):
            if lines[top][:2] != "%%":
                break
            name = lines[top][2:].split(maxsplit=1)[0] if lines[top][2:].strip() else ""
            self.file = name in ("writefile", "file") and lines[top].rstrip().endswith(".py")
            if name not in PYTHON_BODY and not self.file:
                self.shell = name in SHELL_BODY
                return
            lines[top] = ""
            if self.file:
                break
        automagic = _automagic(lines)
        while not _is_python(lines):
            special = syntax.first_special(lines) or automagic
            if special is None or special.line in self.specials:
                self._skip("it is not Python")
                return
            self.specials[special.line] = special
            self._cover(lines, special)
        try:
            self.module = cst.parse_module("\n".join(lines))
        except cst.ParserSyntaxError:
            self._skip("it is not Python")
            return

    @cached_property
    def positions(self) -> Mapping[cst.CSTNode, CodeRange]:
        """The positions of nodes in the Python that was parsed."""
        assert self.module is not None
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        return cast("Mapping[cst.CSTNode, CodeRange]", wrapper.resolve(PositionProvider))

    @cached_property
    def _wide(self) -> Mapping[cst.CSTNode, CodeRange]:
        """Positions that include the parentheses around an expression."""
        assert self.module is not None
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        return cast(
            "Mapping[cst.CSTNode, CodeRange]", wrapper.resolve(WhitespaceInclusivePositionProvider)
        )

    def _cover(self, lines: list[str], special: Special) -> None:
        """Replace special syntax with Python, line for line."""
        line = special.line
        python = "None" if special.assigns else "pass"
        if special.kind == "magic" and special.name in PAYLOAD and special.count == 1:
            argument = special.argument
            if _is_python([argument]) and (at := self.lines[line].rfind(argument)) >= 0:
                python = argument
                self._shift[line] = at - len(special.before)
        lines[line] = special.before + python
        for rest in range(line + 1, line + special.count):
            lines[rest] = ""

    def _skip(self, why: str) -> None:
        first = min(syntax.next_statement(self.lines, 0), len(self.lines) - 1)
        if self.lines[first].strip():
            what = f"{why}: check it yourself"
            self.changes.append(
                Change(self.index, first + 1, "skipped", self.lines[first].strip(), what)
            )

    def command(self, line: int) -> str:
        """The text of the magic or shell line that begins at a line (from 0), without `!`."""
        special = self.specials[line]
        if special.kind in ("shell", "capture"):
            return special.argument
        return f"%{special.name} {special.argument}"

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The span of a node in the cell's text, with the parentheses around it.

        The span of an argument includes its name and value, but not the comma.
        """
        if isinstance(node, cst.Arg):
            start = self.span(node.keyword or node.value)[0] - len(node.star)
            return start, self.span(node.value)[1]
        in_parentheses = isinstance(node, cst.BaseExpression) and node.lpar
        place = (self._wide if in_parentheses else self.positions)[node]
        return (
            self.offset(place.start.line - 1, place.start.column),
            self.offset(place.end.line - 1, place.end.column),
        )

    def offset(self, line: int, column: int) -> int:
        """The offset in the text of a line (from 0) and column of the Python that was parsed."""
        return self._starts[line] + column + self._shift.get(line, 0)

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def line_of(self, node: cst.CSTNode) -> int:
        """The line (from 0) on which a node starts."""
        return self.positions[node].start.line - 1

    # Changing

    @property
    def edits(self) -> int:
        """The number of edits."""
        return len(self._spans)

    def replace(self, start: int, end: int, text: str) -> None:
        """Replace a span of the text."""
        self._spans.append((start, 2, end, text))

    def replace_node(self, node: cst.CSTNode, text: str) -> None:
        """Replace the text of a node."""
        self.replace(*self.span(node), text)

    def note(self, line: int, what: str, kind: Kind = "rewritten", before: str = "") -> None:
        """Add to the report; `line` from 0."""
        shown = before or self.lines[line].strip()
        self.changes.append(Change(self.index, line + 1, kind, _one_line(shown), what))

    def mark(
        self,
        line: int,
        advice: str,
        *,
        before: cst.CSTNode | None = None,
        report: bool = True,
    ) -> None:
        """Put a comment above a line (from 0), unless it is already there.

        `before`: the code that the comment is about, which may be further down in a statement of
        several lines.
        """
        comment = f"{MARK}{_one_line(advice)}"
        if self._is_marked(line, comment):
            return
        self.insert_above(line, comment)
        if report and before is not None:
            self.note(self.line_of(before), advice, "marked", self.code(before))
        elif report:
            self.note(line, advice, "marked")

    def _is_marked(self, line: int, comment: str) -> bool:
        above = line - 1
        while above >= 0 and self.lines[above].lstrip().startswith(MARK):
            if self.lines[above].strip() == comment:
                return True
            above -= 1
        text = f"{self.indent(line)}{comment}\n"
        return (self._starts[line], 1, self._starts[line], text) in self._spans

    def insert_above(self, line: int, text: str) -> None:
        """Insert a line above a line (from 0), with the same indentation."""
        at = self._starts[line]
        self._spans.append((at, 1, at, f"{self.indent(line)}{text}\n"))

    def insert_text(self, line: int, text: str) -> None:
        """Insert whole lines above a line (from 0)."""
        at = self._starts[line]
        self._spans.append((at, 1, at, text))

    def indent_lines(self, first: int, last: int) -> None:
        """Indent lines (from 0, inclusive) by one level."""
        for line in range(first, last + 1):
            if self.lines[line].strip():
                self._spans.append((self._starts[line], 2, self._starts[line], "    "))

    def insert_below(self, line: int, text: str, indent: str) -> None:
        """Insert a line below a line (from 0)."""
        if line + 1 < len(self.lines):
            at = self._starts[line + 1]
            self._spans.append((at, 0, at, f"{indent}{text}\n"))
        else:
            self._spans.append((len(self.text), 3, len(self.text), f"\n{indent}{text}"))

    def delete_line(self, line: int) -> None:
        """Delete a line (from 0)."""
        start = self._starts[line]
        end = start + len(self.lines[line]) + 1
        self._last_line_is_deleted |= end > len(self.text)
        self.replace(start, min(end, len(self.text)), "")

    def indent(self, line: int) -> str:
        """The white space at the beginning of a line."""
        return self.lines[line][: len(self.lines[line]) - len(self.lines[line].lstrip())]

    def comment_out(self, first: int, last: int) -> None:
        """Comment out whole lines (from 0, inclusive); other edits to them are dropped."""
        width = len(self.indent(first))
        for line in range(first, last + 1):
            text = self.lines[line]
            if line in self._commented_out or not text.strip():
                continue
            self._commented_out.add(line)
            column = min(width, len(self.indent(line)))
            # The bar separates "%" and "!" from the start of the comment, because notebook
            # editors would treat them as a magic.
            bar = "| " if text.lstrip()[:1] in "!%" else ""
            at = self._starts[line] + column
            self._spans.append((at, 2, at, f"# {bar}"))

    def result(self) -> str:
        """Return the text with all edits."""
        pieces: list[str] = []
        done = 0
        # Sorting is stable: insertions at one place keep their order.
        for start, _, end, text in sorted(self._spans, key=lambda span: (span[0], span[1])):
            if end > start and self._in_comment(start, end):
                continue
            if end <= done and start < done:
                continue  # part of a span that was replaced as a whole
            if start < done:
                raise AssertionError(f"edits overlap at {self.text[start:end]!r}")
            pieces += [self.text[done:start], text]
            done = end
        edited = "".join([*pieces, self.text[done:]])
        return edited.removesuffix("\n") if self._last_line_is_deleted else edited

    def _in_comment(self, start: int, end: int) -> bool:
        first = self.text.count("\n", 0, start)
        return first in self._commented_out


def _is_python(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _automagic(lines: list[str]) -> Special | None:
    """`pip install x` as the only line of a cell, to which IPython adds the %."""
    at = syntax.next_statement(lines, 0)
    if at == len(lines) or syntax.next_statement(lines, at + 1) < len(lines):
        return None
    name, _, argument = lines[at].strip().partition(" ")
    return Special("magic", at, 1, "", name, argument, "") if name in ("pip", "conda") else None


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
