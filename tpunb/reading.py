"""From the executed cells to the script that is to run, and what reading it shows."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tpunb.errors import LintError
from tpunb.lint.check import lint
from tpunb.lint.findings import Finding
from tpunb.models import Script, Snapshot
from tpunb.notebook.capture import capture
from tpunb.notebook.history import History
from tpunb.script.convert import convert
from tpunb.script.replicate import static_reason

ASKED = "--replicate"
KNOWN_SINCE = (2, 9)
"""The torch_xla whose names lint knows: on an older one an error need not be one."""


@dataclass(frozen=True)
class Reading:
    """A notebook at the moment its train cell runs, as it was read."""

    snapshot: Snapshot
    script: Script
    replicate: str | None
    """Why every rank must run the prelude itself; None: it runs once."""
    findings: tuple[Finding, ...]
    """What lint has found, in order of the notebook."""

    def refuse(self) -> None:
        """Raise LintError where the run would surely fail. Nothing was started yet."""
        certain = [finding for finding in self.findings if finding.certain]
        if certain and _installed() >= KNOWN_SINCE:
            raise LintError(certain)

    def note(self) -> str:
        """What lint has found in a line; '' if there is neither error nor warning."""
        counts = Counter(finding.severity for finding in self.findings)
        if not counts["error"] + counts["warning"]:
            return ""
        kinds = ", ".join(
            f"{counts[kind]} {kind}{'s' if counts[kind] > 1 else ''}"
            for kind in ("error", "warning", "hint")
            if counts[kind]
        )
        severity = "error" if counts["error"] else "warning"
        worst = next(finding for finding in self.findings if finding.severity == severity)
        return (
            f"lint: {kinds} (--dry-run shows them). The first: cell [{worst.cell}], "
            f"line {worst.line}: {worst.message}"
        )


def read(
    history: History,
    cell: str,
    *,
    notebook: str | None,
    user_ns: Mapping[str, object],
    replicate: bool,
) -> Reading:
    """Capture, convert and lint. Raises NotebookError and ConversionError.

    `cell` is the train cell's body, `notebook` the path that the user gave, `replicate`
    whether every rank is to run the prelude anyway.
    """
    snapshot = capture(history, cell, notebook=notebook, user_ns=user_ns)
    script = convert(snapshot)
    reason = ASKED if replicate else static_reason(script)
    return Reading(snapshot, script, reason, tuple(lint(snapshot)))


def _installed() -> tuple[int, ...]:
    """The version of torch_xla here, as its package says it."""
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
