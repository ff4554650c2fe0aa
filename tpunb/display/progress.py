"""Progress of a run: its bars, its speed, and the time left.

Bars come from `tpunb.track`, or are read from the text that libraries print: tqdm's, which
transformers and Lightning use, and fastprogress's, which fastai uses.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpunb.runs.events import Bar, Phase
from tpunb.utils.text import duration

WINDOW = 20.0
"""Seconds over which a speed is measured."""


def fraction(bars: Sequence[Bar]) -> float | None:
    """The share that is done of nested loops, outermost first; None if it is not known.

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


def count_steps(bars: Sequence[Bar]) -> int:
    """Steps of the innermost loop so far: epoch 3 of 10 (two are done) at batch 5 of 20: 45."""
    count = 0
    for bar in bars:
        count = count * (bar.total or 0) + bar.done
    return count


def slowest_bars(bars: Mapping[int, Sequence[Bar]]) -> Sequence[Bar]:
    """The bars of the rank that is furthest behind, which every rank has reached."""
    return min(bars.values(), key=lambda of_rank: fraction(of_rank) or 0.0, default=())


def describe_bars(bars: Sequence[Bar]) -> str:
    """'epoch 3 of 10 · step 5 of 20', '1,200 steps'."""
    return " · ".join(_describe_bar(bar, inner=index > 0) for index, bar in enumerate(bars))


def _describe_bar(bar: Bar, *, inner: bool) -> str:
    name = bar.name or "step"
    # Libraries name their bars freely: 'Epoch 1', 'Validation DataLoader 0'.
    name += ":" if not name.isalpha() else ""
    if bar.total is None:
        return f"{name} {bar.done:,}"
    # For the outer loop, the number of the epoch that is running.
    done = min(bar.done + (1 if not inner and name.lower() == "epoch" else 0), bar.total)
    return f"{name} {done:,} of {bar.total:,}"


# Progress bars that libraries print

# ' 45%|████▌     | 45/100 [00:01<00:02, 30.1it/s]', with a description in front of it
_TQDM = re.compile(
    r"^\s*(?P<name>.*?):?\s*\d+%\|[^|]*\|\s*(?P<done>[\d.]+)(?P<unit>[kMGT]?)/"
    r"(?P<total>[\d.]+)(?P<of>[kMGT]?)(?P<times>\s*\[\d.*)"
)
# 'Epoch 1/2 : |█████-----| 50.00% [2/4 00:01<00:01 0.5]'
_FASTPROGRESS = re.compile(
    r"^\s*(?P<name>.*?)\s*:?\s*\|[^|]*\|\s*[\d.]+%\s*(?=\[)"
    r"(?P<times>\[(?P<done>\d+)/(?P<total>\d+) \d.*)"
)
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bar(line: str) -> Bar | None:
    """The progress bar that a line shows; None for any other line."""
    if (match := _FASTPROGRESS.match(line)) is not None:
        return Bar(match["name"], int(match["done"]), int(match["total"]))
    if (match := _TQDM.match(line)) is None:
        return None
    done = float(match["done"]) * _UNITS[match["unit"]]
    total = float(match["total"]) * _UNITS[match["of"]]
    return Bar(match["name"].strip(), int(done), int(total))


def strip_times(line: str) -> str:
    """A progress bar without its elapsed and remaining time; any other line as it is."""
    match = _TQDM.match(line) or _FASTPROGRESS.match(line)
    return line if match is None else line[: match.start("times")]


# Speed and time left


def describe_wait(phase: Phase, elapsed: float) -> str:
    """How long a prelude still takes, `elapsed` seconds after its cell began; '' if unknown.

    'about 18 s left' by what its cells took before; 'about 12 s' for the cell alone, if one below
    it is not known; '31 s (took 12 s before)' for a cell that is late.
    """
    if phase.expected is None:
        return ""
    if elapsed >= max(phase.expected + 1, 1.25 * phase.expected):
        took = duration(phase.expected) if phase.expected >= 1 else "less than 1 s"
        return f"{duration(elapsed)} (took {took} before)"
    if phase.rest is None:
        return f"about {duration(phase.expected)}" if phase.expected >= 1 else ""
    left = max(0.0, phase.expected - elapsed) + phase.rest
    return f"about {duration(left)} left" if left >= 1 else ""


@dataclass
class Speed:
    """How fast a count grows, over the last `WINDOW` seconds."""

    _counts: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now: float, count: float) -> None:
        """Add a count. One that is smaller than the last starts over."""
        if self._counts and count < self._counts[-1][1]:
            self._counts.clear()
        self._counts.append((now, count))
        while len(self._counts) > 2 and now - self._counts[1][0] >= WINDOW:
            self._counts.popleft()

    def per_second(self) -> float | None:
        """The speed; None until the count has grown for a second."""
        if not self._counts:
            return None
        (start, first), (end, last) = self._counts[0], self._counts[-1]
        return (last - first) / (end - start) if end - start >= 1.0 and last > first else None


TIMED = 3
"""Steps that must be timed before they tell how long the others take."""


@dataclass
class TimeLeft:
    """The time left, if a run continues at its average speed so far."""

    _start: tuple[float, float, int] | None = None
    """Time, share and steps from which on the speed is measured."""
    _known: bool = False

    def seconds(
        self, now: float, share: float | None, steps: int | None = None, *, compiling: bool = False
    ) -> float | None:
        """The time left when `share` (0 to 1) is done; None while it is too early to tell.

        That is until TIMED of the `steps` were timed after the first ones, which are `compiling`
        and say nothing about the others.
        """
        if share is None:
            return None
        if self._start is not None and share < self._start[1]:
            self._start, self._known = None, False
        begins = compiling or (steps is not None and steps < 1)
        if self._start is None or (begins and not self._known):
            self._start = now, share, steps or 0
        since, first, before = self._start
        timed = self._known or steps is None or steps - before >= TIMED
        if not timed or share - first <= 0 or now - since < 1.0:
            return None
        self._known = True
        return (1 - share) * (now - since) / (share - first)
