"""How far a run has come, how fast it goes, and how long it may still take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpunb.events import Bar

WINDOW = 20.0
"""Seconds over which a speed is measured."""


def fraction(bars: Sequence[Bar]) -> float | None:
    """The share of nested loops that is done, the outermost first; None if it is not known.

    Epoch 3 of 10 (two are done) at batch 5 of 20: 0.225.
    """
    share, weight, known = 0.0, 1.0, False
    for bar in bars:
        if not bar.total:
            break
        share += weight * min(bar.done, bar.total) / bar.total
        weight /= bar.total
        known = True
    return min(1.0, share) if known else None


def folded(bars: Mapping[int, Sequence[Bar]]) -> Sequence[Bar]:
    """The bars of the rank that is furthest behind: what all ranks have done at least."""
    return min(bars.values(), key=lambda mine: fraction(mine) or 0.0, default=())


def in_words(bars: Sequence[Bar]) -> str:
    """'epoch 3 of 10 · step 5 of 20', '1,200 steps'."""
    return " · ".join(_words(bar, inner=index > 0) for index, bar in enumerate(bars))


def _words(bar: Bar, *, inner: bool) -> str:
    name = bar.name or "step"
    # What a library's bar is called may be anything: 'Epoch 1', 'Validation DataLoader 0'.
    name += ":" if not name.isalpha() else ""
    if bar.total is None:
        return f"{name} {bar.done:,}"
    # Of the loop around others the number of the round that goes on is told.
    done = min(bar.done + (1 if not inner and name.lower() == "epoch" else 0), bar.total)
    return f"{name} {done:,} of {bar.total:,}"


@dataclass
class Speed:
    """How fast a count grows."""

    _seen: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now: float, count: float) -> None:
        """The count is this now. One that is smaller than before begins anew."""
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()

    def per_second(self) -> float | None:
        """None before it has grown for a second."""
        if not self._seen:
            return None
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end - start >= 1.0 and last > first else None


@dataclass
class Remaining:
    """When it will be done, if it goes on as it went since it began."""

    _began: tuple[float, float] | None = None

    def seconds(self, now: float, share: float | None) -> float | None:
        """`share`: what is done now, from 0 to 1. None while that says too little."""
        if share is None:
            return None
        if self._began is None or share < self._began[1]:
            self._began = (now, share)
        since, first = self._began
        if share - first <= 0 or now - since < 1.0:
            return None
        return (1 - share) * (now - since) / (share - first)
