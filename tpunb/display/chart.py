"""One metric over its steps, as a picture in HTML: with axes, for a panel that is looked at."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 680, 240
"""Pixels. In a narrow page it shrinks …"""
NARROWEST = 400
"""… until its numbers could not be read; then it is scrolled."""
MOST = 600
"""Points that are drawn; of more, each is the mean of equally many."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 24
_INK, _LINE = "#808080", "#2f81f7"
_TICKS = 6
"""At an axis, at most."""

_EPS = 1e-9
"""How far rounding may be off."""

Point = tuple[float, float]


def image(points: Sequence[Point], name: str, *, log: bool) -> str:
    """The picture of steps and values; with `log`, values of 0 and below are left out."""
    known = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log)]
    if len(known) < 2:
        return f"<i>{escape(name)}: nothing to draw yet</i>"
    known = _fewer(known)
    xs = [x for x, _ in known]
    ys = [math.log10(y) if log else y for _, y in known]
    low, high = min(ys), max(ys)
    if math.isclose(low, high):  # or else rounding would look like a fall
        low, high = low - 0.5, high + 0.5

    def across(x: float) -> float:
        return _LEFT + (x - xs[0]) / ((xs[-1] - xs[0]) or 1) * (WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for y in _powers(low, high) if log else _round(low, high):
        value = 10**y if log else y
        parts.append(
            f'<path d="M{_LEFT} {down(y):.1f}H{WIDTH - _RIGHT}" stroke="{_INK}" opacity="0.3"/>'
            f'<text x="{_LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        )
    for x in _round(xs[0], xs[-1], 1):
        anchor = "end" if WIDTH - across(x) < _LEFT / 2 else "middle"
        parts.append(
            f'<text x="{across(x):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{x:,.0f}</text>'
        )
    line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in zip(xs, ys, strict=True))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">{"".join(parts)}'
        f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="1.5"/></svg>'
    )
    data = base64.b64encode(svg.encode()).decode()
    said = escape(f"{name} from {known[0][1]:.3g} to {known[-1][1]:.3g}", quote=True)
    return (
        f'<div style="overflow:auto"><img alt="{said}" src="data:image/svg+xml;base64,{data}" '
        f'style="max-width:100%;min-width:{NARROWEST}px;height:auto"></div>'
    )


def _round(low: float, high: float, least: float = 0.0) -> list[float]:
    """Round numbers from `low` to `high`, equally far from each other, by `least` or more."""
    step = max((high - low) / (_TICKS - 1), least)
    power = 10.0 ** math.floor(math.log10(step))
    step = power * next(n for n in (1, 2, 5, 10) if n * power >= step * (1 - _EPS))
    numbers = range(math.ceil(low / step - _EPS), math.floor(high / step + _EPS) + 1)
    return [number * step for number in numbers]


def _powers(low: float, high: float) -> list[float]:
    """Logarithms of powers of ten from `low` to `high`; of 2 and 5 times them where few are."""
    found = _round(low, high, 1)
    if len(found) > 2:
        return found
    powers = range(math.floor(low), math.ceil(high) + 1)
    every = [power + math.log10(times) for power in powers for times in (1, 2, 5)]
    return [one for one in every if low - _EPS <= one <= high + _EPS] or [low, high]


def _fewer(points: Sequence[Point]) -> list[Point]:
    each = math.ceil(len(points) / MOST)
    parts = (points[i : i + each] for i in range(0, len(points), each))
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]
