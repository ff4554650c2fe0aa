"""The table of rules. A rule is one entry with a function that looks for it in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tpunb.notebook.lint.findings import Severity
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.walk import ParsedCell, Site


@dataclass(frozen=True)
class Hit:
    """One place that a rule found."""

    at: Site | tuple[ParsedCell, int]
    """A site, or a cell and a line in it."""
    message: str
    fix: str | None = None
    """What to do here, where the rule's own fix is too general."""
    severity: Severity | None = None
    """Where it differs from the rule's."""
    certain: bool = False
    """Whether it fails if the run comes to this place; whether it comes there is decided
    by `reachability`."""

    where: Site | None = None
    """What the run has to come to instead, for `certain`: the `if` around this place."""
    several: bool = False
    """Whether it fails with several ranks only."""

    @property
    def cell(self) -> ParsedCell:
        return self.at.cell if isinstance(self.at, Site) else self.at[0]

    @property
    def line(self) -> int:
        return self.at.line if isinstance(self.at, Site) else self.at[1]


Check = Callable[[NotebookIndex], Iterable[Hit]]


@dataclass(frozen=True)
class Rule:
    """One thing to look for."""

    id: str
    severity: Severity
    what: str
    """What it finds, in a few words."""
    fact: str
    """Why it matters on a TPU."""
    source: str
    """Where the fact is from: measured, a file of torch_xla, an issue."""
    fix: str
    check: Check
    kernel: bool = False
    """Whether it also counts in cells that are no part of a run, which the notebook runs."""


RULES: dict[str, Rule] = {}


def rule(
    id: str,
    severity: Severity,
    *,
    what: str,
    fact: str,
    source: str,
    fix: str,
    kernel: bool = False,
) -> Callable[[Check], Check]:
    """Add a function to the table: it yields a Hit for each place it finds."""

    def add(check: Check) -> Check:
        if id in RULES:
            raise ValueError(f"two rules have the id {id!r}")
        RULES[id] = Rule(id, severity, what, fact, source, fix, check, kernel)
        return check

    return add


def table() -> str:
    """The rules as a Markdown table, for the documentation."""
    rows = ["| rule | severity | finds | why | what to do |", "|---|---|---|---|---|"]
    for entry in RULES.values():
        cells = (
            f"`{entry.id}`",
            entry.severity,
            entry.what,
            f"{entry.fact} ({entry.source})",
            entry.fix,
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"
