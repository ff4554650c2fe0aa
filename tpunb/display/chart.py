"""Charts of a metric over its steps, with axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from tpunb.display.html import svg_url
from tpunb.runs.metrics import thin_out


class Size(NamedTuple):
    """Size of a chart in pixels, and about how many numbers an axis has."""

    width: int
    height: int
    ticks: int


LARGE = Size(680, 260, 6)
"""Size in the panel; on a narrow page the chart shrinks to NARROWEST."""
NARROWEST = 400
"""Minimum width of a chart in the panel, so that its numbers stay readable; then it scrolls."""
SMALL = Size(248, 150, 4)
"""Size in a card: three charts in a row on a page of 1280 pixels, or one on a narrow page."""
MAX_POINTS = 600
"""Maximum number of points; if there are more values, each point is the mean of several."""
_LEFT, _RIGHT, _BOTTOM, _TOP = 52, 16, 34, 26
_INK, _LINE = "#808080", "#2f81f7"

_EPS = 1e-9
"""Tolerance for rounding."""

Point = tuple[float, float]


def chart_html(points: Sequence[Point], name: str, *, log: bool) -> str:
    """Return the chart for the panel; on a `log` scale, values of 0 and below are left out."""
    image = chart_image(points, name, LARGE, log=log, style=f"min-width:{NARROWEST}px;")
    if not image:
        return f"<i>{escape(name)}: nothing to draw yet</i>"
    return f'<div style="overflow:auto">{image}</div>'


def chart_image(
    points: Sequence[Point], name: str, size: Size, *, log: bool = False, style: str = ""
) -> str:
    """Return the chart as HTML; '' before there are two points."""
    points = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log)]
    if len(points) < 2:
        return ""
    points = thin_out(points, MAX_POINTS)
    width, height, ticks = size
    xs = [x for x, _ in points]
    ys = [math.log10(y) if log else y for _, y in points]
    low, high = min(ys), max(ys)
    if math.isclose(low, high):  # otherwise rounding errors would look like changes
        low, high = low - 0.5, high + 0.5
    rows = _powers(low, high, ticks) if log else _round_numbers(low, high, ticks)
    columns = _round_numbers(xs[0], max(xs[-1], xs[0] + 1), ticks, least=1)

    def across(x: float) -> float:
        share = (x - columns[0]) / (columns[-1] - columns[0])
        return _LEFT + share * (width - _LEFT - _RIGHT)

    def down(y: float) -> float:
        share = (y - rows[0]) / (rows[-1] - rows[0])
        return height - _BOTTOM - share * (height - _TOP - _BOTTOM)

    parts = [
        f'<text x="4" y="13" font-weight="bold">{escape(name)}</text>',
        f'<text x="{width - _RIGHT}" y="{height - 4}" text-anchor="end">step</text>',
    ]
    for y in rows:
        value = 10**y if log else y
        parts.append(
            f'<path d="M{_LEFT} {down(y):.1f}H{width - _RIGHT}" stroke="{_INK}" opacity="0.3"/>'
            f'<text x="{_LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        )
    for x in columns:
        anchor = "end" if x > 999 and x == columns[-1] else "middle"
        right = width - 2 if anchor == "end" else across(x)
        parts.append(
            f'<text x="{right:.1f}" y="{height - _BOTTOM + 15}" text-anchor="{anchor}">'
            f"{x:,.0f}</text>"
        )
    line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in zip(xs, ys, strict=True))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">{"".join(parts)}'
        f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="1.5"/></svg>'
    )
    alt = escape(f"{name} from {points[0][1]:.3g} to {points[-1][1]:.3g}", quote=True)
    return f'<img alt="{alt}" src="{svg_url(svg)}" style="max-width:100%;{style}height:auto">'


def _round_numbers(low: float, high: float, about: int, *, least: float = 0.0) -> list[float]:
    """Return `about` as many round numbers, at least `least` apart, with the range within."""
    step = max((high - low) / (about - 1), least)
    power = 10.0 ** math.floor(math.log10(step))
    step = power * next(n for n in (1, 2, 5, 10) if n * power >= step * (1 - _EPS))
    numbers = range(math.floor(low / step + _EPS), math.ceil(high / step - _EPS) + 1)
    return [number * step for number in numbers]


def _powers(low: float, high: float, about: int) -> list[float]:
    """Return the logarithms of powers of ten with the range within; of a small range, of 2 and 5
    times them as well.
    """
    if high - low >= 2:
        return _round_numbers(low, high, about, least=1)
    powers = range(math.floor(low) - 1, math.ceil(high) + 2)
    every = [power + math.log10(times) for power in powers for times in (1, 2, 5)]
    first = sum(y <= low + _EPS for y in every) - 1
    last = next(index for index, y in enumerate(every) if y >= high - _EPS)
    return every[first : max(last, first + 2) + 1]
