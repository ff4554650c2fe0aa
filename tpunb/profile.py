"""Which ranks of a run write a trace, and of which of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Profile:
    """`--profile 0,3:5-10`."""

    ranks: tuple[int, ...]
    first: int
    """A step, from 1."""
    last: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Profile | None:
        """The inverse of `asdict`."""
        if data is None:
            return None
        return cls(tuple(data["ranks"]), data["first"], data["last"])
