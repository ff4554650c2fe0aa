"""A code cell: its text, the syntax tree of the Python in it, and edits to the text.

Edits are spans of the cell's own text. Everything else, including comments, magics and shell
lines, therefore stays exactly as it is.
"""

from __future__ import annotations

import ast
import keyword
import re
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from tpunb.notebook.convert import magics, syntax
from tpunb.notebook.convert.cells import mark_automagic
from tpunb.notebook.convert.syntax import Special
from tpunb.notebook.migrate.report import MARK, Change, Kind

PYTHON_BODY = magics.UNWRAPPED.keys() | {"tpu_debug"}
"""Cell magics whose body is Python of the notebook."""
SHELL_BODY = frozenset(("bash", "sh", "!", "system", "sx"))
"""Cell magics whose body is a shell script."""


@dataclass
class CodeCell:
    """A code cell under migration."""

    index: int
    text: str
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))
    """Empty if the cell is not Python."""
    python: bool = False
    """False if the cell is not Python, or is a cell magic whose body is not Python."""
    shell: bool = False
    """True if the body is a shell script."""
    file: bool = False
    """True if the body is a Python module that the cell writes: a separate program."""
    specials: dict[int, Special] = field(default_factory=dict)
    """Magics and shell lines, keyed by their first line, from 0."""
    changes: list[Change] = field(default_factory=list)
    _shift: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Lines in which the Python from a column on is further to the right in the text."""
    _spans: list[tuple[int, int, int, str]] = field(default_factory=list)
    _commented_out: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lines = self.text.split("\n")
        self._python = list(self.lines)
        self._starts = [0, *accumulate(len(line) + 1 for line in self.lines)]
        self._parse()

    # Reading

    def _parse(self) -> None:
        """Parse the cell, with a Python statement in place of each magic and shell line."""
        if "\r" in self.text:
            self._skip("it has carriage returns")
            return
        lines = self._python
        top = syntax.next_statement(lines, 0)
        while top < len(lines) and lines[top].startswith("%%") and not self.file:
            name = (lines[top][2:].split() or [""])[0]
            self.file = name in ("writefile", "file") and lines[top].rstrip().endswith(".py")
            if name not in PYTHON_BODY and not self.file:
                self.shell = name in SHELL_BODY
                return
            lines[top] = ""
            top = syntax.next_statement(lines, top)
        mark_automagic(lines)
        while (tree := syntax.parsed(lines)) is None:
            special = syntax.first_special(lines)
            if special is None or special.line in self.specials:
                self._skip("it is not Python")
                return
            self.specials[special.line] = special
            self._cover(special)
        self.tree, self.python = tree, True

    def _cover(self, special: Special) -> None:
        """Replace special syntax with Python, line for line."""
        line = special.line
        python = "None" if special.assigns else "pass"
        if special.kind == "magic" and special.name in magics.TIMED and special.count == 1:
            code = magics.timed_code(special.argument, magics.TIMED[special.name])
            if code and syntax.parsed([code]) and (at := self.lines[line].rfind(code)) >= 0:
                python = code
                self._shift[line] = len(special.before), at - len(special.before)
        rest = [""] * (special.count - 1)
        self._python[line : line + special.count] = [special.before + python, *rest]

    def _skip(self, why: str) -> None:
        first = min(syntax.next_statement(self.lines, 0), len(self.lines) - 1)
        if self.lines[first].strip():
            self.note(first, f"{why}: check it yourself", "skipped")

    @cached_property
    def _code(self) -> str:
        """The text with comments and backslashes at the ends of lines blanked."""
        lines = list(self.lines)
        for token in tokenize.generate_tokens(iter(f"{line}\n" for line in self._python).__next__):
            if token.type == tokenize.COMMENT:
                line = lines[token.start[0] - 1]
                lines[token.start[0] - 1] = line.removesuffix(token.string).ljust(len(line))
        return "\n".join(lines).replace("\\\n", "  ")

    def command(self, line: int) -> str:
        """The text of the magic or shell line that begins at a line (from 0), without `!`."""
        special = self.specials[line]
        if special.kind in ("shell", "capture"):
            return special.argument
        return f"%{special.name} {special.argument}"

    def bare_span(self, node: ast.AST) -> tuple[int, int]:
        """The span of a node in the cell's text, without parentheses around it."""
        first, last = line_of(node), last_line_of(node)
        start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        return self._offset(first, start), self._offset(last, end)

    def _offset(self, line: int, column: int) -> int:
        """The offset in the text of a line (from 0) and a column, which counts UTF-8 bytes."""
        text = self._python[line]
        characters = column if text.isascii() else len(text.encode()[:column].decode())
        first, shift = self._shift.get(line, (0, 0))
        return self._starts[line] + characters + (shift if characters >= first else 0)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The span of a node in the cell's text, with the parentheses around it.

        The span of an argument includes its name and value, but not the comma.
        """
        start, end = self.bare_span(node)
        if isinstance(node, ast.Starred | ast.keyword):
            return start, self.span(node.value)[1]
        while isinstance(node, ast.expr):
            before = self._code[:start].rstrip()
            after = self.next_code(end)
            called = re.search(r"\w+$|[)\]]$", before[:-1].rstrip())
            if before[-1:] != "(" or self._code[after : after + 1] != ")":
                break
            if called is not None and not keyword.iskeyword(called[0]):
                break  # the parentheses of a call
            start, end = len(before) - 1, after + 1
        return start, end

    def line_span(self, line: int) -> tuple[int, int]:
        """The span of a line (from 0)."""
        return self._starts[line], self._starts[line] + len(self.lines[line])

    def next_code(self, offset: int) -> int:
        """The offset of the first character of code from an offset on."""
        rest = self._code[offset:]
        return offset + len(rest) - len(rest.lstrip())

    def share_line(self, first: ast.AST, second: ast.AST) -> bool:
        """Whether two consecutive statements are on one line, which backslashes may continue."""
        between = self._python[last_line_of(first) : line_of(second)]
        return all(line.endswith("\\") for line in between)

    def begins_line(self, node: ast.AST) -> bool:
        """Whether only white space precedes a node on its line."""
        return not self._python[line_of(node)][: node.col_offset].strip()  # type: ignore[attr-defined]

    def code(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    # Changing

    @property
    def edits(self) -> int:
        return len(self._spans)

    def replace(self, start: int, end: int, text: str) -> None:
        self._spans.append((start, 2, end, text))

    def insert(self, offset: int, text: str) -> None:
        self.replace(offset, offset, text)

    def replace_node(self, node: ast.AST, text: str) -> None:
        self.replace(*self.span(node), text)

    def note(self, line: int, what: str, kind: Kind = "rewritten", before: str = "") -> None:
        """Add to the report; `line` from 0."""
        shown = before or self.lines[line].strip()
        self.changes.append(Change(self.index, line + 1, kind, _one_line(shown), what))

    def mark(
        self, line: int, advice: str, *, before: ast.AST | None = None, report: bool = True
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
            self.note(line_of(before), advice, "marked", self.code(before))
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
        self.insert_text(line, f"{self.indent(line)}{text}\n")

    def insert_text(self, line: int, text: str) -> None:
        """Insert whole lines above a line (from 0)."""
        at = self._starts[line]
        self._spans.append((at, 1, at, text))

    def indent_lines(self, first: int, last: int) -> None:
        """Indent lines (from 0, inclusive) by one level."""
        for line in range(first, last + 1):
            if self.lines[line].strip():
                self.insert(self._starts[line], "    ")

    def insert_below(self, line: int, text: str, indent: str) -> None:
        """Insert a line below a line (from 0)."""
        at = self._starts[line + 1]
        self._spans.append((at, 0, at, f"{indent}{text}\n"))

    def delete_line(self, line: int) -> None:
        self.replace(self._starts[line], self._starts[line + 1], "")

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
            # The bar separates "%" and "!" from the start of the comment, because notebook
            # editors would treat them as a magic.
            bar = "| " if text.lstrip()[:1] in "!%" else ""
            self.insert(self._starts[line] + min(width, len(self.indent(line))), f"# {bar}")

    def result(self) -> str:
        """Return the text with all edits."""
        given = f"{self.text}\n"
        pieces: list[str] = []
        done = 0
        # Sorting is stable: insertions at one place keep their order.
        for start, _, end, text in sorted(self._spans, key=lambda span: (span[0], span[1])):
            if end > start and self.text.count("\n", 0, start) in self._commented_out:
                continue
            if end <= done and start < done:
                continue  # part of a span that was replaced as a whole
            if start < done:
                raise AssertionError(f"edits overlap at {self.text[start:end]!r}")
            pieces += [given[done:start], text]
            done = end
        return "".join([*pieces, given[done:]]).removesuffix("\n")


def line_of(node: ast.AST) -> int:
    """The line (from 0) on which a node starts."""
    return node.lineno - 1  # type: ignore[attr-defined,no-any-return]


def last_line_of(node: ast.AST) -> int:
    """The line (from 0) on which a node ends."""
    return node.end_lineno - 1  # type: ignore[attr-defined,no-any-return]


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
