"""Charts: a metric over its steps, with axes, and how a step's time was spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from tpunb.display.html import svg_url
from tpunb.runs.metrics import thin_out
from tpunb.runs.step_times import StepTimes


class Size(NamedTuple):
    """Size of a chart in pixels, maximum numbers on an axis, and whether it has a title."""

    width: int
    height: int
    ticks: int
    titled: bool


LARGE = Size(680, 260, 6, True)
"""Size in the panel; on a narrow page the chart shrinks to NARROWEST."""
NARROWEST = 400
"""Minimum width of a chart in the panel, so that its numbers stay readable; then it scrolls."""
SMALL = Size(264, 136, 4, False)
"""Size in a card, below name and value: three charts in a row, or one on a narrow page."""
MAX_POINTS = 600
"""Maximum number of points; if there are more values, each point is the mean of several."""
_LEFT, _RIGHT, _BOTTOM, _TITLE = 52, 12, 34, 14
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
    width, height, ticks, titled = size
    top = 8 + _TITLE * titled
    xs = [x for x, _ in points]
    ys = [math.log10(y) if log else y for _, y in points]
    low, high = min(ys), max(ys)
    if math.isclose(low, high):  # otherwise rounding errors would look like changes
        low, high = low - 0.5, high + 0.5

    def across(x: float) -> float:
        return _LEFT + (x - xs[0]) / ((xs[-1] - xs[0]) or 1) * (width - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return height - _BOTTOM - (y - low) / (high - low) * (height - top - _BOTTOM)

    parts = [f'<text x="4" y="13">{escape(name)}</text>'] if titled else []
    parts.append(f'<text x="{width - _RIGHT}" y="{height - 4}" text-anchor="end">step</text>')
    for y in _powers(low, high, ticks) if log else _round_numbers(low, high, ticks):
        value = 10**y if log else y
        parts.append(
            f'<path d="M{_LEFT} {down(y):.1f}H{width - _RIGHT}" stroke="{_INK}" opacity="0.3"/>'
            f'<text x="{_LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{value:.6g}</text>'
        )
    for x in _round_numbers(xs[0], xs[-1], ticks, least=1):
        anchor = "end" if width - across(x) < _LEFT / 2 else "middle"
        parts.append(
            f'<text x="{across(x):.1f}" y="{height - _BOTTOM + 15}" text-anchor="{anchor}">'
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


def _round_numbers(low: float, high: float, most: int, *, least: float = 0.0) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`, at least `least` apart."""
    step = max((high - low) / (most - 1), least)
    power = 10.0 ** math.floor(math.log10(step))
    step = power * next(n for n in (1, 2, 5, 10) if n * power >= step * (1 - _EPS))
    numbers = range(math.ceil(low / step - _EPS), math.floor(high / step + _EPS) + 1)
    return [number * step for number in numbers]


def _powers(low: float, high: float, most: int) -> list[float]:
    """Return the logarithms of powers of ten in a range; if few, of 2 and 5 times them as well."""
    tens = _round_numbers(low, high, most, least=1)
    if len(tens) > 2:
        return tens
    powers = range(math.floor(low), math.ceil(high) + 1)
    every = [power + math.log10(times) for power in powers for times in (1, 2, 5)]
    return [y for y in every if low - _EPS <= y <= high + _EPS] or [low, high]


_PARTS = {
    "waiting for input": "#bf8700",
    "compiling": "#8957e5",
    "collectives": "#e5534b",
    "Python": "#2f81f7",
    "device": "#2da44e",
    "idle": "#c9d1d9",
}
"""Colours of the parts of a step's time, the same in both bars."""


def steps_image(steps: StepTimes) -> str:
    """Return a picture of a mean step's time: a bar for the ranks' Python, one for the devices."""
    bars = [("ranks", steps.host_parts()), ("devices", steps.device_parts())]
    width, left, thick = 560, 56, 20
    drawn: list[str] = []
    named: dict[str, None] = {}
    down = 4
    for name, parts in bars:
        if not parts:
            continue
        drawn.append(f'<text x="0" y="{down + 14}">{name}</text>')
        across = float(left)
        for part, took in parts:
            wide = (width - left) * took / max(steps.seconds, 1e-12)
            drawn.append(
                f'<rect x="{across:.1f}" y="{down}" width="{wide:.1f}" height="{thick}" '
                f'fill="{_PARTS[part]}"/>'
            )
            across += wide
            named[part] = None
        down += thick + 4
    across = float(left)
    for part in named:
        drawn.append(
            f'<rect x="{across:.0f}" y="{down + 4}" width="10" height="10" fill="{_PARTS[part]}"/>'
            f'<text x="{across + 14:.0f}" y="{down + 13}">{part}</text>'
        )
        across += 28 + 6.5 * len(part)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{down + 20}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">{"".join(drawn)}</svg>'
    )
    alt = escape(str(steps), quote=True)
    return f'<img alt="{alt}" src="{svg_url(svg)}" style="max-width:100%;height:auto">'
