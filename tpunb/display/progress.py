"""Progress of a run: its bars, its speed, and the time left.

Bars come from `tpunb.track`, or are parsed from the output of libraries: of tqdm, which
transformers and Lightning use, and of fastprogress, which fastai uses.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpunb.runs.events import Bar, Phase
from tpunb.utils.text import duration

WINDOW = 5.0
"""Seconds over which a speed is measured, or longer until there are TIMED steps."""


def fraction(bars: Sequence[Bar]) -> float | None:
    """Return the finished share of nested loops, outermost first; None if it is unknown.

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
    """Return the steps of the innermost loop so far.

    Epoch 3 of 10 (two are done) at batch 5 of 20: 45.
    """
    count = 0
    for bar in bars:
        count = count * (bar.total or 0) + bar.done
    return count


def slowest_bars(bars: Mapping[int, Sequence[Bar]]) -> Sequence[Bar]:
    """Return the bars of the rank that is furthest behind: every rank has got that far."""
    return min(bars.values(), key=lambda of_rank: fraction(of_rank) or 0.0, default=())


def describe_bars(bars: Sequence[Bar]) -> str:
    """Describe bars: 'epoch 3 of 10 · step 5 of 20', 'step 1,200'."""
    return " · ".join(_describe_bar(bar, inner=index > 0) for index, bar in enumerate(bars))


def _describe_bar(bar: Bar, *, inner: bool) -> str:
    name = bar.name or "step"
    # Libraries name their bars freely: 'Epoch 1', 'Validation DataLoader 0'.
    name += ":" if not name.isalpha() else ""
    if bar.total is None:
        return f"{name} {bar.done:,}"
    # In the outer loop, count the running epoch.
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
    """Parse a line with a progress bar; None for any other line."""
    if (match := _FASTPROGRESS.match(line)) is not None:
        return Bar(match["name"], int(match["done"]), int(match["total"]))
    if (match := _TQDM.match(line)) is None:
        return None
    done = float(match["done"]) * _UNITS[match["unit"]]
    total = float(match["total"]) * _UNITS[match["of"]]
    return Bar(match["name"].strip(), int(done), int(total))


def strip_times(line: str) -> str:
    """Remove the elapsed and remaining time from a progress bar; return other lines unchanged."""
    match = _TQDM.match(line) or _FASTPROGRESS.match(line)
    return line if match is None else line[: match.start("times")]


# Speed and time left

TIMED = 3
"""Steps from which a speed and the time left are estimated."""


def describe_wait(phase: Phase, elapsed: float) -> str:
    """Describe the time left of a prelude, `elapsed` seconds after its cell began; '' if unknown.

    'about 18 s left', from the cells' earlier durations; 'about 12 s' for this cell alone, if the
    duration of a later cell is unknown; '31 s (took 12 s before)' if the cell is late.
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
    """The growth rate of a count over the newest seconds: the first steps, which compile, last."""

    _counts: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now: float, count: float) -> None:
        """Add a count; a count smaller than the last one restarts the measurement."""
        if self._counts and count < self._counts[-1][1]:
            self._counts.clear()
        self._counts.append((now, count))
        while len(self._counts) > 2:
            then, before = self._counts[1]
            if now - then < WINDOW or count - before < TIMED:
                break
            self._counts.popleft()

    def per_second(self) -> float | None:
        """Return the speed; None until the count has grown for a second."""
        if not self._counts:
            return None
        (start, first), (end, last) = self._counts[0], self._counts[-1]
        return (last - first) / (end - start) if end - start >= 1.0 and last > first else None


@dataclass
class TimeLeft:
    """The time left, if a run continues at its average speed so far."""

    _start: tuple[float, float, int] | None = None
    """Time, share and steps at which the measurement of the speed began."""
    _known: bool = False

    def seconds(
        self, now: float, share: float | None, steps: int | None = None, *, compiling: bool = False
    ) -> float | None:
        """Return the seconds left when `share` (0 to 1) is done; None while it is too early.

        The estimate needs TIMED `steps` after the first ones, which are `compiling` and not
        representative.
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
