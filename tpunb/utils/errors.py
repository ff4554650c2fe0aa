"""The base class of tpunb's errors, and errors that do not belong to a single package."""

from __future__ import annotations

from tpunb.utils import terminal


class TpunbError(Exception):
    """Base of every error that tpunb raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the message, without tpunb's own frames.

        IPython calls this instead of formatting a traceback (IPython 7.34 to 9.18).
        """
        text = terminal.join(": ", [type(self).__name__, self._shown()])
        return [terminal.coloured(terminal.paint_first_line(text, terminal.Style.BAD))]

    def _shown(self) -> str:
        return str(self)


class SetupError(TpunbError):
    """This machine or environment cannot run what was requested."""


NO_INPUT = (
    "cannot ask the user in a run: assign the value, or put it into os.environ in a cell tagged "
    "tpu-skip (a run has the kernel's environment)"
)
"""What follows the name of a function that asks."""


class DeviceBusyError(SetupError):
    """The TPU is in use. `holder` names the process or run that uses it, `fix` the remedy."""

    def __init__(self, holder: str, fix: str) -> None:
        super().__init__(holder, fix)
        self.holder = holder
        self.fix = fix

    def __str__(self) -> str:
        return f"the TPU is held by {self.holder}, and a chip has one holder at a time: {self.fix}"


class MissingPackageError(SetupError):
    """A required package is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(package, needed_for, install)
        self.package = package
        self.needed_for = needed_for
        self.install = install

    def __str__(self) -> str:
        return (
            f"{self.package} is needed for {self.needed_for} and is not installed: {self.install}"
        )


class LaunchError(TpunbError, RuntimeError):
    """A rank of several starts processes as ranks, which are processes already."""


class HandoffError(TpunbError):
    """A value could not be passed from a rank to the kernel, or from the kernel to a rank."""


class CheckpointError(TpunbError):
    """A checkpoint cannot be written, or cannot be read as requested.

    `path`: the path or URL of the file or folder.
    """

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        return self.reason


class DataError(TpunbError):
    """Data could not be downloaded or uploaded; the data at the destination is unchanged."""
