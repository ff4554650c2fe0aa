"""The table of rules. Each rule has a function that finds its violations in a notebook.

A rule is about a mistake that the run itself does not show in its first second: it hangs, trains
wrongly or is slow, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from tpunb.notebook.lint.findings import Severity
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.scopes import ParsedCell, Site
from tpunb.runs.spec import BackendName


@dataclass(frozen=True)
class Hit:
    """One violation of a rule."""

    at: Site | tuple[ParsedCell, int]
    """A site, or a cell and a line in it."""
    message: str
    fix: str | None = None
    """The fix for this violation, if the rule's own fix is too general."""
    severity: Severity | None = None
    """The severity of this violation, if it differs from the rule's."""
    certain: bool = False
    """True if a run that reaches this line certainly fails there. `reachability` decides
    whether the run reaches it."""
    where: Site | None = None
    """The site that the run must reach instead for `certain`: the `if` around the line."""
    about: ParsedCell | None = None
    """The train cell that it is about, if the line is in another cell."""

    @property
    def cell(self) -> ParsedCell:
        return self.at.cell if isinstance(self.at, Site) else self.at[0]

    @property
    def line(self) -> int:
        return self.at.line if isinstance(self.at, Site) else self.at[1]


Backends = frozenset[BackendName]
XLA: Backends = frozenset(("xla",))
TORCHTPU: Backends = frozenset(("torchtpu",))
TPUS: Backends = XLA | TORCHTPU
ANY: Backends = TPUS | {"torch"}

Check = Callable[[NotebookIndex], Iterable[Hit]]


@dataclass(eq=False)
class Rule:
    """A rule, and the decorator of the function that yields a Hit for each violation of it."""

    id: str
    severity: Severity
    _: KW_ONLY
    what: str
    """A short description of the code that violates the rule."""
    why: str
    """Why it matters, with the evidence: a measurement, a file of torch_xla, an issue."""
    fix: str
    kernel: bool = False
    """True if the rule is about the whole notebook, also about cells outside of any run."""
    several: bool = False
    """True if the rule is about several ranks: it is not checked for a run on one."""
    backends: Backends = ANY
    """The backends of whose notebooks it is true."""
    fixes: Mapping[BackendName, str] = field(default_factory=dict)
    """The fix for notebooks of a backend, where it is another one than `fix`."""
    check: Check = field(init=False)

    def __call__(self, check: Check) -> Check:
        if self.id in RULES:
            raise ValueError(f"two rules have the id {self.id!r}")
        self.check = check
        RULES[self.id] = self
        return check


RULES: dict[str, Rule] = {}


def without_xla(fix: str) -> dict[BackendName, str]:
    """The fix for notebooks that train without torch_xla, for `fixes`."""
    return {"torchtpu": fix, "torch": fix}


def table() -> str:
    """Return the rules as a Markdown table, for the documentation."""
    rows = ["| rule | severity | for | finds | why | what to do |", "|---|---|---|---|---|---|"]
    for entry in RULES.values():
        others = dict.fromkeys(entry.fixes.values())
        fixes = "".join(f"; {', '.join(entry.fixes)}: {fix}" for fix in others)
        backends = (
            "all" if entry.backends == ANY else ", ".join(sorted(entry.backends, reverse=True))
        )
        if entry.several:
            backends += "; several ranks"
        told = (entry.what, entry.why, entry.fix + fixes)
        cells = (f"`{entry.id}`", entry.severity, backends, *told)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"
