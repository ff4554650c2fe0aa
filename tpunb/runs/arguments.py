"""Arguments of `tpunb.launch` that are not literals: a file of the run that each rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpunb.runs.ownership import HeldFolder
from tpunb.runs.returns import load_value
from tpunb.utils.errors import HandoffError

NAME = "_tpunb_arguments"
"""Their name in the train cell: `train(0.1, _tpunb_arguments["model"])`."""


class Arguments:
    """Reads the file when an argument is first used, in the rank's `__main__`.

    All arguments are in one file, so that an optimizer still holds the parameters of its model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if self._values is None:
            try:
                held = HeldFolder(self._path.parent)
                self._values = load_value(held.path_of(self._path.name))
                held.close()
            except Exception as error:  # a user's class may raise anything when it is rebuilt
                raise HandoffError(
                    f"a rank cannot rebuild the arguments ({type(error).__name__}: {error}): "
                    "define their classes in a cell above the call of tpunb.launch"
                ) from error
        return self._values[name]
