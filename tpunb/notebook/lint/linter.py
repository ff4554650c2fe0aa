"""Run all rules on a notebook.

`# tpunb: ignore[rule, rule]` suppresses findings, `# tpunb: ignore` all of them. At the end of a
line it applies to that line, and on the first line of a statement to the whole statement; alone on
a line above the cell's first statement it applies to the cell.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field

from tpunb.notebook.lint import checks as checks  # fills the table of rules
from tpunb.notebook.lint.findings import SEVERITIES, Finding
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.reachability import Reachability
from tpunb.notebook.lint.rule_table import RULES, Hit, Rule
from tpunb.notebook.models import Snapshot
from tpunb.notebook.parsing import parse_cells
from tpunb.notebook.scopes import ParsedCell, Site
from tpunb.runs.spec import BackendName

UNKNOWN = "unknown-rule"
"""The rule that reports an ignore comment with an unknown rule id."""
_CORES = re.compile(r"%%tpu_train\b.*?--cores[ =]+(\d+)\b")

_Key = tuple[int, int, str, str]
"""Cell, line, rule and message: what is found once."""


def lint(
    snapshot: Snapshot,
    held: Container[str] = (),
    *,
    rules: Collection[str] = RULES.keys(),
    backend: BackendName = "xla",
    ranks: int | None = None,
    own: bool = False,
) -> list[Finding]:
    """Return the findings in the order of the notebook; within a line, the most severe first. A
    rule finds a line once.

    Nothing is run or imported. If there are train cells, the rules check the notebook as
    `%%tpu_train` runs each of them: what another train cell does is no evidence. Otherwise they
    check it as its kernel runs it. Findings that `# tpunb: ignore[...]` suppresses are left out.

    `held`: names whose values the kernel passes to the run. `rules`: the ids of the rules that are
    run. `backend`: what the notebook trains with; rules of other backends are not run. `ranks`: the
    number of ranks, if it is known; otherwise a train cell's `--cores` says it. `own`: only
    findings in the cells that the run of the snapshot's own train cell executes.
    """
    cells, train = parse_cells(snapshot), snapshot.train
    chosen = [rule for rule in RULES.values() if rule.id in rules and backend in rule.backends]
    found: dict[_Key, Finding] = {}
    runs = _runs(cells, train, own)
    for run in runs:
        notebook = NotebookIndex(run, held, backend, ranks or _cores(run[-1]))
        every = run == cells
        found |= _check(notebook, [rule for rule in chosen if every or not rule.kernel], train)
    if cells not in runs:
        left = [rule for rule in chosen if rule.kernel or not runs]
        found |= _check(NotebookIndex(cells, held, backend, ranks), left, train)
    suppressions = {cell.index: _read_suppressions(cell) for cell in cells}
    found |= {
        (cell.index, finding.line, UNKNOWN, finding.message): finding
        for cell in cells
        for finding in _unknown_rules(cell, suppressions[cell.index])
    }
    outside = {cell.index for cell in cells if own and not cell.runs}
    first: dict[tuple[int, int, str], Finding] = {}
    for key in sorted(found, key=lambda key: _order(key, found[key])):
        index, line, rule, _ = key
        if index not in outside and not suppressions[index].covers(rule, line):
            first.setdefault((index, line, rule), found[key])
    return list(first.values())


def _order(key: _Key, finding: Finding) -> tuple[int, int, int, bool, str, str]:
    """The order of findings: by line, the most severe first."""
    index, line, rule, message = key
    return index, line, SEVERITIES.index(finding.severity), not finding.certain, rule, message


def _runs(cells: list[ParsedCell], train: int | None, own: bool) -> list[list[ParsedCell]]:
    """The cells of each run: a train cell and the prelude above it; with `own`, of one run. The
    snapshot's own is the last.
    """
    ends = [c for c in cells if c.part == "train" and (c.index == train or not own)]
    return [
        [c for c in cells if c is end or (c.part == "prelude" and c.index < end.index)]
        for end in sorted(ends, key=lambda cell: cell.index == train)
    ]


def _cores(train: ParsedCell) -> int | None:
    """The number of ranks that a train cell asks for itself."""
    match = next(filter(None, map(_CORES.match, train.lines)), None)
    return None if match is None else int(match[1])


def _check(
    notebook: NotebookIndex, rules: Iterable[Rule], train: int | None
) -> dict[_Key, Finding]:
    """Run rules on the cells of a notebook. `train`: the snapshot's own train cell."""
    reachability = Reachability(notebook)
    found: dict[_Key, Finding] = {}
    for rule in rules:
        if rule.several and not notebook.several:
            continue
        for hit in rule.check(notebook):
            if hit.cell.part != "kernel" or rule.kernel:
                finding = _finding(rule, hit, notebook, reachability, train)
                found.setdefault((hit.cell.index, finding.line, rule.id, hit.message), finding)
    return found


def _finding(
    rule: Rule,
    hit: Hit,
    notebook: NotebookIndex,
    reachability: Reachability,
    train: int | None,
) -> Finding:
    cell, severity = hit.cell, hit.severity or rule.severity
    line = min(max(hit.line, 1), len(cell.lines))
    certain = (
        severity == "error"
        and hit.certain
        and isinstance(hit.at, Site)
        and reachability.reaches(hit.where or hit.at)
        and reachability.names_are_sure(hit.at)
    )
    programs = [p for p in notebook.programs if p.cell is not None and p.cell.index == train]
    reached = isinstance(hit.at, Site) and any(hit.at in program for program in programs)
    return Finding(
        rule.id,
        severity,
        cell.number,
        line,
        hit.message,
        hit.fix or rule.fixes.get(notebook.backend, rule.fix),
        certain,
        own=reached or (hit.about or cell).index == train,
        below=train is not None and cell.index > train,
        source=cell.lines[line - 1],
    )


def _unknown_rules(cell: ParsedCell, suppressions: Suppressions) -> Iterator[Finding]:
    for line, name in suppressions.named:
        if name not in RULES:
            message = f"there is no rule {name!r} to ignore"
            fix = "remove it, or use the id of a rule in docs/lint.md"
            source = cell.lines[line - 1]
            yield Finding(UNKNOWN, "hint", cell.number, line, message, fix, source=source)


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
