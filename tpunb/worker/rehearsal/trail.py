"""Where a rank's collectives came from, and the word it leaves for those that wait for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tpunb.worker.rehearsal.calls import Call, Where, parting


@dataclass(frozen=True)
class Farewell:
    """Word of a rank that makes no more collective calls."""

    calls: int
    last: str
    """Where its last collective was; '' if it took part in none."""
    apart: str
    exchanges: Mapping[str, int]
    """By group of ranks, how many exchanges it took part in."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Farewell:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


class Trail:
    """The places of one rank's collectives, as far as they are needed."""

    def __init__(self) -> None:
        self.calls = 0
        self._last: Where | None = None
        self.apart = ""
        """'number 4, at cell [1], line 6: …', the first that the ranks made from different
        lines; '' if there was none."""

    def add(self, where: Where | None, marks: Sequence[int]) -> None:
        """A collective that all ranks agree on: from where, and the marks of all their places."""
        self.calls += 1
        self._last = where
        if not self.apart and len(set(marks)) > 1:
            self.apart = f"number {self.calls}, at {where}"

    @property
    def last(self) -> str:
        """Where the last collective was called."""
        return "" if self._last is None else str(self._last)


def departed(rank: int, trail: Trail, call: Call, left: Mapping[int, Farewell]) -> str:
    """The message of a rank that waits for others that have gone home."""
    names = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, sorted(left)))}"
    have = "have" if len(left) > 1 else "has"
    first = left[min(left)]
    last = f", the last at {first.last}" if first.last else ""
    lines = [
        f"{names} {have} returned from the train cell while rank {rank} waited in {call}: it is "
        f"the {_ordinal(trail.calls + 1)} collective of rank {rank}, and {names} took part in "
        f"{first.calls or 'none'}{last}.",
        "Every rank must make the same collective calls. Does one rank have a batch less, leave "
        "its loop early, or pass by a condition on the rank? On a TPU this would hang.",
        *parting({rank: trail.apart, **{r: word.apart for r, word in left.items()}}),
    ]
    return "\n".join(lines)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0)
    return f"{number}{ending or 'th'}"
