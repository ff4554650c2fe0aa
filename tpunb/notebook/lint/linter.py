"""Check a notebook for what would fail, hang or be slow on a TPU.

`# tpunb: ignore[rule, rule]` suppresses findings, `# tpunb: ignore` all of them. At the end of a
line it counts for that line, and on the first line of a statement for the whole statement; alone on
a line above the cell's first statement it counts for the cell.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import tokenize
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tpunb.notebook.lint import checks as checks  # fills the table of rules
from tpunb.notebook.lint.findings import SEVERITIES, Finding
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.reachability import Reachability
from tpunb.notebook.lint.rules import RULES, Hit, Rule
from tpunb.notebook.lint.walk import ParsedCell, Site, parse_cells
from tpunb.notebook.models import Cell, Snapshot

UNKNOWN = "unknown-rule"
"""The rule of a comment that names a rule which does not exist."""


def lint(snapshot: Snapshot, held: Container[str] = ()) -> list[Finding]:
    """The findings in a notebook, in its order; in a line the worst first.

    Reads only: nothing is run or imported. With a train cell the rules look at it as
    `%%tpu_train` runs it; without one, at the notebook as its kernel runs it. What
    `# tpunb: ignore[...]` suppresses is left out. `held`: names that a kernel gives the run.
    """
    with _without_collector():
        findings = _lint(parse_cells(snapshot), held)
        written = [cell for cell in snapshot.cells if _writes_module(cell)]
        for cell in written:
            findings += _lint_module(snapshot, cell)
        numbers = {each.number: at for at, each in enumerate(parse_cells(snapshot))}
    return sorted(findings, key=lambda f: numbers[f.cell or 0]) if written else findings


def _writes_module(cell: Cell) -> bool:
    head = cell.source.lstrip().partition("\n")[0].split()
    return (
        cell.kind == "code"
        and len(head) > 1
        and (head[0] in ("%%writefile", "%%file") and head[-1].endswith(".py"))
    )


def _lint_module(snapshot: Snapshot, cell: Cell) -> Iterator[Finding]:
    """The findings in the module that a `%%writefile` cell writes, a program of its own."""
    source = re.sub(r"^(\s*)%%", r"\1# %%", cell.source, count=1)
    [number] = [each.number for each in parse_cells(snapshot) if each.index == cell.index]
    alone = replace(cell, source=source, index=0, number=number, tags=())
    for finding in _lint(parse_cells(Snapshot((alone,), None, None, "a module")), ()):
        yield replace(finding, certain=False)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Trees are many objects that stay: searching them for garbage would take half the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _lint(cells: list[ParsedCell], held: Container[str]) -> list[Finding]:
    notebook = NotebookIndex(cells, held)
    reachability = Reachability(notebook)
    suppressions = {cell.index: _read_suppressions(cell) for cell in cells}
    findings: dict[tuple[int, int, int, str, str], Finding] = {}
    for rule in RULES.values():
        for hit in rule.check(notebook):
            if hit.cell.part == "kernel" and not rule.kernel:
                continue
            finding = _finding(rule, hit, reachability)
            if not suppressions[hit.cell.index].covers(rule.id, finding.line):
                worst = SEVERITIES.index(finding.severity)
                key = (hit.cell.index, finding.line, worst, rule.id, finding.message)
                findings.setdefault(key, finding)
    for cell in cells:
        for line, name in _unknown(suppressions[cell.index]):
            findings[cell.index, line, len(SEVERITIES), UNKNOWN, name] = Finding(
                UNKNOWN,
                "hint",
                cell.number,
                line,
                f"there is no rule {name!r} to ignore",
                "take it out, or name one of the rules in docs/lint.md",
                source=cell.lines[line - 1],
            )
    notebook.close()
    return [findings[key] for key in sorted(findings)]


def _finding(rule: Rule, hit: Hit, reachability: Reachability) -> Finding:
    cell = hit.cell
    line = min(max(hit.line, 1), len(cell.lines))
    severity = hit.severity or rule.severity
    certain = (
        severity == "error"
        and hit.certain
        and isinstance(hit.at, Site)
        and reachability.reaches(hit.where or hit.at)
        and reachability.names_are_sure(hit.at)
    )
    fix = hit.fix or rule.fix
    return Finding(
        rule.id,
        severity,
        cell.number,
        line,
        hit.message,
        fix,
        certain,
        hit.several,
        cell.lines[line - 1],
    )


def _unknown(suppressions: Suppressions) -> Iterator[tuple[int, str]]:
    for line, name in suppressions.named:
        if name not in RULES:
            yield line, name


_IGNORE = re.compile(r"#\s*tpunb:\s*ignore(?:\[([^\]]*)\])?")
RuleIds = frozenset[str]
_ALL_RULES: RuleIds = frozenset("*")


@dataclass
class Suppressions:
    """The rules that comments suppress in one cell."""

    cell: RuleIds = frozenset()
    lines: dict[int, RuleIds] = field(default_factory=dict)
    named: list[tuple[int, str]] = field(default_factory=list)
    """Each rule that is named, with its line."""

    def covers(self, rule: str, line: int) -> bool:
        """Whether a finding of a rule in a line is suppressed."""
        rules = self.cell | self.lines.get(line, frozenset())
        return "*" in rules or rule in rules


def _read_suppressions(cell: ParsedCell) -> Suppressions:
    """The comments of a cell."""
    suppressions = Suppressions()
    if not any("tpunb:" in line for line in cell.lines):
        return suppressions
    top = min((node.lineno for node in cell.tree.body), default=len(cell.lines) + 1)
    in_line: dict[int, RuleIds] = {}
    for line, alone, comment in _comments(cell):
        match = _IGNORE.search(comment)
        if match is None:
            continue
        names = [name.strip() for name in (match[1] or "").split(",") if name.strip()]
        suppressions.named += [(line, name) for name in names]
        rules = frozenset(names) if match[1] is not None else _ALL_RULES
        if alone and line < top:
            suppressions.cell |= rules
        else:
            in_line[line] = in_line.get(line, frozenset()) | rules
    for line, rules in in_line.items():
        for covered in _statement(cell.tree, line):
            suppressions.lines[covered] = suppressions.lines.get(covered, frozenset()) | rules
    return suppressions


def _comments(cell: ParsedCell) -> Iterator[tuple[int, bool, str]]:
    """Line, whether it is alone on it, and text of each comment, also behind magics."""
    lines = list(cell.lines)
    for line in cell.left_out:
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
