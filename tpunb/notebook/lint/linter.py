"""Run all rules on a notebook.

`# tpunb: ignore[rule, rule]` suppresses findings, `# tpunb: ignore` all of them. At the end of a
line it applies to that line, and on the first line of a statement to the whole statement; alone on
a line above the cell's first statement it applies to the cell.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import tokenize
from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tpunb.notebook.lint import checks as checks  # fills the table of rules
from tpunb.notebook.lint.findings import SEVERITIES, Finding
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.reachability import Reachability
from tpunb.notebook.lint.rules import RULES, Hit, Rule
from tpunb.notebook.models import Cell, Snapshot
from tpunb.notebook.parsing import parse_cells
from tpunb.notebook.scopes import ParsedCell, Site
from tpunb.runs.spec import BackendName

UNKNOWN = "unknown-rule"
"""The rule that reports an ignore comment with an unknown rule id."""


def lint(
    snapshot: Snapshot,
    held: Container[str] = (),
    *,
    rules: Collection[str] = RULES.keys(),
    backend: BackendName = "xla",
    ranks: int | None = None,
    own: bool = False,
) -> list[Finding]:
    """Return the findings in the order of the notebook; within a line, the most severe first.

    Nothing is run or imported. If there are train cells, the rules check the notebook as
    `%%tpu_train` runs each of them: what another train cell does is no evidence. Otherwise they
    check it as its kernel runs it. Findings that `# tpunb: ignore[...]` suppresses are left out.

    `held`: names whose values the kernel passes to the run. `rules`: the ids of the rules that are
    run. `backend`: what the notebook trains with; rules of other backends are not run. `ranks`: the
    number of ranks, if it is known. `own`: only findings about the snapshot's own train cell, and
    about the cells that run before it.
    """
    rules = [name for name in RULES if name in rules and backend in RULES[name].backends]
    cells = parse_cells(snapshot)
    of_runs = [name for name in rules if not RULES[name].kernel]
    with _without_collector():
        runs = _runs(cells, snapshot.train, own)
        if runs == [cells]:
            runs = []  # all are of the one run
        whole = [name for name in rules if not runs or name not in of_runs]
        found = _lint(cells, whole, backend, held, snapshot.train, ranks)
        for run in runs:
            known = _lint(run, of_runs, backend, held, snapshot.train, ranks)
            found = {**known, **found} if run[-1].index != snapshot.train else {**found, **known}
        if own:
            others = {c.number for c in cells if c.part == "train" and c.index != snapshot.train}
            found = {key: each for key, each in found.items() if each.cell not in others}
        findings = [found[key] for key in sorted(found)]
        written = [cell for cell in snapshot.cells if _writes_module(cell)]
        for cell in written:
            findings += _lint_module(snapshot, cell, rules, backend)
        numbers = {each.number: at for at, each in enumerate(cells)}
    return sorted(findings, key=lambda f: numbers[f.cell or 0]) if written else findings


def _runs(cells: list[ParsedCell], train: int | None, own: bool) -> list[list[ParsedCell]]:
    """The cells of each run: a train cell and the prelude above it; with `own`, of one run."""
    return [
        [c for c in cells if c is end or (c.part == "prelude" and c.index < end.index)]
        for end in cells
        if end.part == "train" and (not own or end.index == train)
    ]


def _writes_module(cell: Cell) -> bool:
    head = cell.source.lstrip().partition("\n")[0].split()
    return (
        cell.kind == "code"
        and len(head) > 1
        and (head[0] in ("%%writefile", "%%file") and head[-1].endswith(".py"))
    )


def _lint_module(
    snapshot: Snapshot, cell: Cell, rules: Collection[str], backend: BackendName
) -> Iterator[Finding]:
    """Check the module that a `%%writefile` cell writes, as a separate program."""
    source = re.sub(r"^(\s*)%%", r"\1# %%", cell.source, count=1)
    [number] = [each.number for each in parse_cells(snapshot) if each.index == cell.index]
    alone = replace(cell, source=source, index=0, number=number, tags=())
    program = parse_cells(Snapshot((alone,), None, None, "a module"))
    for _, finding in sorted(_lint(program, rules, backend).items()):
        yield replace(finding, certain=False)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch garbage collection off: scanning the many live AST nodes takes half of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _lint(
    cells: list[ParsedCell],
    rules: Collection[str],
    backend: BackendName,
    held: Container[str] = (),
    train: int | None = None,
    ranks: int | None = None,
) -> dict[tuple[int, int, int, str, str], Finding]:
    """Run rules on cells. The findings are keyed by cell, line, severity, rule and message."""
    notebook = NotebookIndex(cells, held, backend, ranks)
    reachability = Reachability(notebook)
    suppressions = {cell.index: _read_suppressions(cell) for cell in cells}
    findings: dict[tuple[int, int, int, str, str], Finding] = {}
    for rule in (RULES[name] for name in rules):
        for hit in rule.check(notebook):
            if hit.cell.part == "kernel" and not rule.kernel:
                continue
            finding = _finding(rule, hit, reachability, *_place(notebook, hit, train))
            if hit.fix is None and backend in rule.fixes:
                finding = replace(finding, fix=rule.fixes[backend])
            if not suppressions[hit.cell.index].covers(rule.id, finding.line):
                worst = SEVERITIES.index(finding.severity)
                key = (hit.cell.index, finding.line, worst, rule.id, finding.message)
                findings.setdefault(key, finding)
    for cell in cells:
        for line, name in suppressions[cell.index].named:
            if name not in RULES:
                findings[cell.index, line, len(SEVERITIES), UNKNOWN, name] = Finding(
                    UNKNOWN,
                    "hint",
                    cell.number,
                    line,
                    f"there is no rule {name!r} to ignore",
                    "remove it, or use the id of a rule in docs/lint.md",
                    source=cell.lines[line - 1],
                )
    notebook.close()
    return findings


def _place(notebook: NotebookIndex, hit: Hit, train: int | None) -> tuple[bool, bool]:
    """Whether a hit is about the snapshot's train cell, and whether it is below that cell."""
    if train is None:
        return False, False
    programs = [p for p in notebook.programs if p.cell is not None and p.cell.index == train]
    reached = isinstance(hit.at, Site) and any(hit.at in program for program in programs)
    cell = hit.cell if hit.about is None else hit.about
    return reached or cell.index == train, hit.cell.index > train


def _finding(rule: Rule, hit: Hit, reachability: Reachability, own: bool, below: bool) -> Finding:
    cell = hit.cell
    line = min(max(hit.line, 1), len(cell.lines))
    severity = hit.severity or rule.severity
    certain = (
        severity == "error"
        and hit.certain
        and isinstance(hit.at, Site)
        and reachability.reaches(hit.where or hit.at)
        and reachability.names_are_sure(hit.at, of_object=hit.of_object)
    )
    return Finding(
        rule.id,
        severity,
        cell.number,
        line,
        hit.message,
        hit.fix or rule.fix,
        certain,
        hit.several,
        own,
        below,
        cell.lines[line - 1],
    )


_IGNORE = re.compile(r"#\s*tpunb:\s*ignore(?:\[([^\]]*)\])?")
RuleIds = frozenset[str]
_ALL_RULES: RuleIds = frozenset("*")


@dataclass
class Suppressions:
    """The rules that ignore comments suppress in one cell."""

    cell: RuleIds = frozenset()
    lines: dict[int, RuleIds] = field(default_factory=dict)
    named: list[tuple[int, str]] = field(default_factory=list)
    """Each rule id in a comment, with its line."""

    def covers(self, rule: str, line: int) -> bool:
        """Whether findings of a rule are suppressed in a line."""
        rules = self.cell | self.lines.get(line, frozenset())
        return "*" in rules or rule in rules


def _read_suppressions(cell: ParsedCell) -> Suppressions:
    """The suppressions in a cell's comments."""
    suppressions = Suppressions()
    if not any("tpunb:" in line for line in cell.lines):
        return suppressions
    ends: dict[int, int] = {}
    """The first line of each statement → its last; of a compound statement, that of its head."""
    for node in ast.walk(cell.tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            body = getattr(node, "body", None)
            ends.setdefault(node.lineno, body[0].lineno - 1 if body else node.end_lineno or 0)
    top = min(ends, default=len(cell.lines) + 1)
    for line, alone, comment in _comments(cell):
        match = _IGNORE.search(comment)
        if match is None:
            continue
        names = [name.strip() for name in (match[1] or "").split(",") if name.strip()]
        suppressions.named += [(line, name) for name in names]
        rules = frozenset(names) if match[1] is not None else _ALL_RULES
        if alone and line < top:
            suppressions.cell |= rules
            continue
        for covered in range(line, max(ends.get(line, line), line) + 1):
            suppressions.lines[covered] = suppressions.lines.get(covered, frozenset()) | rules
    return suppressions


def _comments(cell: ParsedCell) -> Iterator[tuple[int, bool, str]]:
    """Yield line, whether the comment is alone on it, and text; includes comments after magics."""
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
        return  # not Python: the comments up to here are kept
