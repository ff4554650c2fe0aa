"""What can go wrong, as exceptions that carry data and make their text when shown.

TpunbError
├─ NotebookError
│   └─ NotebookNotFoundError
├─ ConversionError      .cell .line
│   └─ LintError        .findings
├─ SetupError
│   ├─ DeviceBusyError
│   └─ MissingPackageError
├─ RunError             .result
│   ├─ RankFailedError
│   ├─ RunHungError
│   ├─ RunTimeoutError
│   └─ RunInterruptedError
├─ HandoffError
├─ CheckpointError      .path
└─ DataError
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpunb import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpunb.lint.findings import Finding
    from tpunb.models import RunResult


class TpunbError(Exception):
    """Base of every error that tpunb raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """The lines a notebook shows: the message, without the launcher's own frames.

        IPython calls this instead of formatting a traceback (IPython 7.34 to 9.18).
        """
        return [terminal.coloured(f"{type(self).__name__}: {self._shown()}")]

    def _shown(self) -> str:
        return str(self)


class NotebookError(TpunbError):
    """The notebook cannot be used as it stands."""


COMMAND = "the command"
"""Where a path comes from that somebody has just typed."""


class NotebookNotFoundError(NotebookError):
    """No file was found behind a name that was given."""

    def __init__(self, path: str, origin: str) -> None:
        super().__init__(path, origin)
        self.path = path
        self.origin = origin

    def __str__(self) -> str:
        if self.origin == COMMAND:
            return f"there is no notebook {self.path!r}"
        return (
            f"there is no notebook {self.path!r} (named by {self.origin}). "
            "Name the file with `%tpu_setup --notebook PATH` or the variable TPUNB_NOTEBOOK."
        )


class ConversionError(TpunbError):
    """A cell cannot become part of a Python script.

    `cell` is the number a person sees beside the cell, `line` the line within it (from 1).
    """

    def __init__(
        self, reason: str, cell: int | None = None, line: int | None = None, source: str = ""
    ) -> None:
        super().__init__(reason, cell, line, source)
        self.reason = reason
        self.cell = cell
        self.line = line
        self.source = source

    def __str__(self) -> str:
        place = "the notebook" if self.cell is None else f"cell [{self.cell}]"
        if self.line is not None:
            place += f", line {self.line}"
        shown = f"\n    {self.source.strip()}" if self.source.strip() else ""
        return f"{place}: {self.reason}{shown}"


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


class SetupError(TpunbError):
    """This machine or environment cannot run what was asked for."""


class DeviceBusyError(SetupError):
    """Somebody has the TPU. `holder` says who, `fix` what to do."""

    def __init__(self, holder: str, fix: str) -> None:
        super().__init__(holder, fix)
        self.holder = holder
        self.fix = fix

    def __str__(self) -> str:
        return f"the TPU is held by {self.holder}, and a chip has one holder at a time: {self.fix}"


class MissingPackageError(SetupError):
    """A package that is needed is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(package, needed_for, install)
        self.package = package
        self.needed_for = needed_for
        self.install = install

    def __str__(self) -> str:
        return (
            f"{self.package} is needed for {self.needed_for} and is not installed: {self.install}"
        )


class RunError(TpunbError):
    """A run did not succeed. `result` says everything that is known about it."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(result)
        self.result = result
        self.folded = False
        """Whether the card of the run holds the traceback: it is not shown twice."""

    def __str__(self) -> str:
        return self.result.explain()

    def _shown(self) -> str:
        return self.result.explain(traceback=not self.folded)


class RankFailedError(RunError):
    """A rank raised, crashed or was killed."""


class RunHungError(RunError):
    """No rank has shown a sign of life for as long as `--hang-timeout` says."""


class RunTimeoutError(RunError):
    """The run took longer than `--timeout` allows."""


class RunInterruptedError(RunError):
    """The run was stopped before its end."""


class HandoffError(TpunbError):
    """A value could not be brought from a rank to the kernel."""


class CheckpointError(TpunbError):
    """A checkpoint cannot be written, or not be read as it was asked for.

    `path`: the file or folder, or its URL.
    """

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        return self.reason


class DataError(TpunbError):
    """Data could not be brought here, or sent away; what was there before is as it was."""
