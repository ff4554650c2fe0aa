"""Arguments of `tpunb.launch` that are no literals: in a file of the run, read by each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpunb.runs.returns import load_value
from tpunb.utils.errors import HandoffError

NAME = "_arguments"
"""What the train cell calls them: `train(0.1, _arguments["model"])`."""


class Arguments:
    """Reads the file when the first of them is needed, by then in the rank's `__main__`.

    All are in one file, so that an optimizer still holds the parameters of its model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if self._values is None:
            try:
                self._values = load_value(self._path)
            except Exception as error:  # whatever a user's class may raise when it is rebuilt
                raise HandoffError(
                    f"a rank cannot rebuild the arguments ({type(error).__name__}: {error}): "
                    "define their classes in a cell above the call of tpunb.launch"
                ) from error
        return self._values[name]
