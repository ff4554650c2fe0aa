"""The findings of lint, and the error for findings that stop a run before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tpunb.notebook.errors import ConversionError
from tpunb.utils.terminal import Style, join, paint

Severity = Literal["error", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")
"""In order, the most severe first."""
_STYLES: dict[Severity, Style] = {"error": Style.BAD, "warning": Style.ODD}


@dataclass(frozen=True)
class Finding:
    """Code that fails, hangs, gives wrong results or is slow on a TPU."""

    rule: str
    """The rule's id, as in `# tpunb: ignore[...]`."""
    severity: Severity
    """`error`: the code fails, hangs or gives wrong results. `warning`: it probably does, or is
    much slower. `hint`: it could be better."""
    cell: int | None
    """The number shown for the cell: its execution count, or otherwise its position among the
    code cells."""
    line: int
    """Within the cell, from 1."""
    message: str
    fix: str
    certain: bool = False
    """True if the run certainly reaches this line and fails there."""
    own: bool = False
    """True if it is about the snapshot's train cell: in it, in a function that it calls, or about
    its values."""
    below: bool = False
    """True if the cell is below the snapshot's train cell."""
    source: str = field(default="", repr=False)
    """The text of the line."""

    def in_one_line(self) -> str:
        """Return place and message; a line below the train cell is quoted, as its cell may not
        have run and then has no number of this kernel.
        """
        place = f"cell [{self.cell}], line {self.line}"
        if self.below:
            place = f"below, `{self.source.strip()}`"
        return f"{place}: {self.message}"

    def to_json(self) -> dict[str, object]:
        """Return the finding in the form of `tpunb lint --json`."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "cell": self.cell,
            "line": self.line,
            "message": self.message,
            "fix": self.fix,
        }

    def __str__(self) -> str:
        """Return the text for terminals: place, severity, message, source line and fix."""
        style = _STYLES.get(self.severity)
        severity = self.severity if style is None else paint(self.severity, style)
        end = f": {self.message} [{self.rule}]"
        head = join("", [f"cell [{self.cell}], line {self.line}: ", severity, end])
        source = [f"    {self.source.strip()}"] if self.source.strip() else []
        return join("\n", [head, *source, paint(f"  → {self.fix}", Style.STRONG, end=4)])


class LintError(ConversionError):
    """The run was not started because it would certainly fail."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        first = findings[0]
        more = f" (and {len(findings) - 1} more like it)" if len(findings) > 1 else ""
        reason = (
            f"{first.message} [{first.rule}]{more}: {first.fix.rstrip('.')}. "
            "Nothing was started; to run it anyway, put "
            f"`# tpunb: ignore[{first.rule}]` at the end of the line"
        )
        super().__init__(reason, first.cell, first.line, first.source)
        self.findings = tuple(findings)
