"""Repeated measurements, and plain text tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass
class Samples:
    """Measurements of one quantity: one or more in each round."""

    rounds: list[list[float]] = field(default_factory=list)

    def add(self, values: Sequence[float]) -> None:
        """Add the values of a round."""
        self.rounds.append(list(values))

    def all(self) -> list[float]:
        return [value for values in self.rounds for value in values]

    def median(self) -> float:
        return median(self.all())

    def over(self, other: Samples) -> Samples:
        """The ratio of the medians of each round."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return Samples([[median(mine) / median(theirs)] for mine, theirs in pairs])

    def minus(self, other: Samples) -> Samples:
        """The difference of the medians of each round."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return Samples([[median(mine) - median(theirs)] for mine, theirs in pairs])

    def text(self, digits: int) -> str:
        """'0.41 (0.38–0.52)': the median, the lowest and the highest."""
        values = self.all()
        low, high = min(values), max(values)
        return f"{self.median():.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def met(samples: Samples, *, most: float = float("inf"), least: float = 0.0) -> str:
    """'met' if the median is within the limits of a goal, otherwise 'missed'."""
    return "met" if least <= samples.median() <= most else "missed"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns, two spaces apart, with a rule below the first row, the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])
