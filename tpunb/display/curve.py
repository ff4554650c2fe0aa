"""The course of one metric, small enough for a line of text or of a card."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, field

POINTS = 40
"""Points that are drawn. More of them are joined two by two, so memory and size are bounded."""
WIDTH, HEIGHT = 120, 26
"""Pixels."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class Curve:
    """The values of a metric in order, at most 2 × POINTS means of equally many of them."""

    values: list[float] = field(default_factory=list)
    _each: int = 1
    _sum: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """One more value. NaN and infinite ones leave no mark."""
        if not math.isfinite(value):
            return
        self._sum += value
        self._count += 1
        if self._count < self._each:
            return
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.values) >= 2 * POINTS:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values = [(a + b) / 2 for a, b in pairs]
            self._each *= 2

    def heights(self, points: int) -> list[float]:
        """At most `points` numbers from 0 (the lowest) to 1; 0.5 where all are equal.

        They are when only rounding tells them apart, as means over ranks are.
        """
        step = max(1, math.ceil(len(self.values) / points))
        chosen = [
            sum(part) / len(part)
            for part in (self.values[i : i + step] for i in range(0, len(self.values), step))
        ]
        low, high = min(chosen, default=0.0), max(chosen, default=0.0)
        if math.isclose(low, high):
            return [0.5] * len(chosen)
        return [(value - low) / (high - low) for value in chosen]

    def text(self, points: int = 10) -> str:
        """'█▅▃▂▁▁', or '' before there are two values."""
        heights = self.heights(points)
        if len(heights) < 2:
            return ""
        return "".join(_BLOCKS[round(height * (len(_BLOCKS) - 1))] for height in heights)

    def image(self, colour: str) -> str:
        """The address of a picture of it: front ends keep pictures, and drop inline SVG."""
        heights = self.heights(POINTS)
        step = (WIDTH - 6) / max(1, len(heights) - 1)
        points = [
            f"{3 + index * step:.0f},{HEIGHT - 3 - height * (HEIGHT - 6):.0f}"
            for index, height in enumerate(heights)
        ]
        x, y = points[-1].split(",")
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">'
            f'<polyline points="{" ".join(points)}" fill="none" stroke="#7d8590" '
            f'stroke-width="1.5"/><circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/></svg>'
        )
        return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
