"""Where in the notebook. Imports nothing: `%load_ext tpunb` comes here, and must feel instant."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A line of the notebook."""

    file: str
    """The name under which IPython compiled the cell."""
    line: int
