"""The report of `%%tpu_debug`: the issues of a cell and their fixes, the most expensive first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MOST = 7
"""Maximal number of findings shown, which fit on a screen."""
_GOOD, _BAD = "#2da44e", "#e5534b"
_FAINT = "opacity:0.7"
_COMMAND = re.compile("`([^`]+)`")


@dataclass(frozen=True)
class Issue:
    kind: str
    """'recompiled', 'read', 'gradients', 'device', 'nan', …"""
    title: str
    """The issue and its cost."""
    where: str
    """'cell [3], line 12: loss.item()'; '' without a line."""
    fix: str
    seconds: float = 0.0
    """The time it cost; infinite if it makes results wrong."""


@dataclass(frozen=True)
class DebugReport:
    findings: Sequence[Issue]
    """The most expensive first."""
    facts: Sequence[str]
    """'20 steps of 3.1 ms', '2 graphs compiled in 1.2 s'."""

    def __str__(self) -> str:
        lines = [" · ".join([self._headline(), *self.facts])]
        for number, finding in enumerate(self.findings[:MOST], 1):
            lines.append(f"{number}. {finding.title}")
            lines += [f"   {finding.where}"] if finding.where else []
            lines.append(f"   → {finding.fix}")
        if more := self._more():
            lines.append(more)
        return "\n".join(lines)

    def html(self) -> str:
        """Return the report as HTML, with inline styles, which every front end keeps."""
        head = f"<b>{escape(self._headline())}</b>" + "".join(f" · {escape(f)}" for f in self.facts)
        parts = [f"<div>{head}</div>"]
        for number, finding in enumerate(self.findings[:MOST], 1):
            fix = _COMMAND.sub(r"<code>\1</code>", escape(finding.fix))
            where = ""
            if finding.where:
                place, colon, source = finding.where.partition(": ")
                code = f"<code>{escape(source)}</code>" if colon else ""
                where = f'<br><span style="{_FAINT}">{escape(place)}{colon}</span>{code}'
            parts.append(
                f'<div style="margin:6px 0 0 0">{number}. {escape(finding.title)}{where}'
                f"<br>→ {fix}</div>"
            )
        if more := self._more():
            parts.append(f'<div style="margin:6px 0 0 0;{_FAINT}">{escape(more)}</div>')
        colour = _BAD if self.findings else _GOOD
        return (
            f'<div style="border-left:3px solid {colour};padding:2px 0 2px 8px;margin:2px 0;'
            f'max-width:860px;line-height:1.5;overflow-wrap:anywhere">{"".join(parts)}</div>'
        )

    def bundle(self) -> dict[str, str]:
        """Return the report for IPython's display."""
        return {"text/plain": str(self), "text/html": self.html()}

    def _headline(self) -> str:
        count = len(self.findings)
        if not count:
            return "%%tpu_debug: no issues found"
        return f"%%tpu_debug: {count} issue{'s' if count > 1 else ''} found"

    def _more(self) -> str:
        left = len(self.findings) - MOST
        return f"and {left} less expensive issues: fix the ones above first" if left > 0 else ""


def describe_seconds(seconds: float) -> str:
    """'3.1 ms', '2.4 s', '3 min'."""
    if seconds < 1:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
