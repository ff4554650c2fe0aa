"""The base of the errors that tpunb raises on purpose, and those of no single package."""

from __future__ import annotations

from tpunb.utils import terminal


class TpunbError(Exception):
    """Base of every error that tpunb raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """The lines a notebook shows: the message, without the launcher's own frames.

        IPython calls this instead of formatting a traceback (IPython 7.34 to 9.18).
        """
        text = terminal.join(": ", [type(self).__name__, self._shown()])
        return [terminal.coloured(terminal.paint_first_line(text, terminal.Style.BAD))]

    def _shown(self) -> str:
        return str(self)


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


UV_INSTALL = "pip install uv && uv pip install --python python3 --torch-backend=cpu"
"""Installs torch, or what needs it. uv finds torch's wheels for the CPU by name, as Colab's and
Kaggle's TPU images have them; pip takes those with CUDA, which are ten times as large."""
INSTALL_XLA = f"{UV_INSTALL} 'tpunb[xla]'"
"""Brings torch and torch_xla."""


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


class HandoffError(TpunbError):
    """A value could not be brought from a rank to the kernel, or the other way."""


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
