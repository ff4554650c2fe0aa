"""A finding of lint: where in the notebook, what is wrong, and what to do; and the error of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tpunb.notebook.errors import ConversionError
from tpunb.utils.terminal import Style, join, paint

Severity = Literal["error", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")
"""The worst first."""
_STYLES: dict[Severity, Style] = {"error": Style.BAD, "warning": Style.ODD}


@dataclass(frozen=True)
class Finding:
    """One thing that fails, hangs, gives wrong results or is slow on a TPU."""

    rule: str
    """The rule's id, which `# tpunb: ignore[...]` names."""
    severity: Severity
    """`error`: it fails, hangs or gives wrong results. `warning`: it probably does, or is much
    slower. `hint`: it could be better."""
    cell: int | None
    """The number shown for the cell: its execution count, else its position among the code
    cells."""
    line: int
    """Within the cell, from 1."""
    message: str
    fix: str
    certain: bool = False
    """Whether the run surely comes to this line and fails there."""
    several: bool = False
    """… if it has several ranks."""
    source: str = field(default="", repr=False)
    """The line itself."""

    def to_json(self) -> dict[str, object]:
        """The form of `tpunb lint --json`."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "cell": self.cell,
            "line": self.line,
            "message": self.message,
            "fix": self.fix,
        }

    def __str__(self) -> str:
        """For terminals: where, how bad, what, the line, and what to do."""
        style = _STYLES.get(self.severity)
        severity = self.severity if style is None else paint(self.severity, style)
        end = f": {self.message} [{self.rule}]"
        head = join("", [f"cell [{self.cell}], line {self.line}: ", severity, end])
        source = [f"    {self.source.strip()}"] if self.source.strip() else []
        return join("\n", [head, *source, paint(f"  → {self.fix}", Style.STRONG, end=4)])


class LintError(ConversionError):
    """The run would surely fail, so it was not started."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        first = findings[0]
        more = f" (and {len(findings) - 1} more like it)" if len(findings) > 1 else ""
        reason = (
            f"{first.message} [{first.rule}]{more}: {first.fix.rstrip('.')}. "
            f"Nothing was started; `# tpunb: ignore[{first.rule}]` behind the line runs it anyway"
        )
        super().__init__(reason, first.cell, first.line, first.source)
        self.findings = tuple(findings)
