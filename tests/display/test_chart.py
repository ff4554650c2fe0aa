"""Charts of metrics: pictures with axes."""

from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree

import pytest

from tpunb.display.chart import MAX_POINTS, chart_html


def drawn(html: str) -> tuple[list[str], list[tuple[float, float]]]:
    """Return the texts and the points of the picture."""
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert found
    svg = ElementTree.fromstring(base64.b64decode(found[1]).decode())
    words = [element.text or "" for element in svg if element.tag.endswith("text")]
    [line] = [element for element in svg if element.tag.endswith("polyline")]
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    return words, points  # type: ignore[return-value]


def test_axes_and_line() -> None:
    words, points = drawn(chart_html([(0, 1.0), (50, 3.0), (100, 5.0)], "loss", log=False))
    assert words == ["loss", "step", "1", "2", "3", "4", "5", "0", "20", "40", "60", "80", "100"]
    (left, low), (middle, half), (right, high) = points
    assert math.isclose(middle, (left + right) / 2, abs_tol=0.1)
    assert math.isclose(half, (low + high) / 2, abs_tol=0.1)
    assert low > high  # y grows downwards in pictures


def test_on_a_log_scale_powers_are_equally_far() -> None:
    points = [(0, -1.0), (1, 0.01), (2, 0.1), (3, 1.0), (4, math.nan), (5, math.inf)]
    words, line = drawn(chart_html(points, "loss", log=True))
    assert words[2:] == ["0.01", "0.1", "1", "1", "2", "3"]
    assert len(line) == 3
    assert math.isclose(line[1][1], (line[0][1] + line[2][1]) / 2, abs_tol=0.1)


@pytest.mark.parametrize(
    ("low", "high", "log", "marks"),
    [
        (0.3775, 2.32, False, "0 0.5 1 1.5 2 2.5"),
        (-0.2, 0.25, False, "-0.2 -0.1 0 0.1 0.2 0.3"),
        (1234.1, 1234.9, False, "1234 1234.2 1234.4 1234.6 1234.8 1235"),
        (2.0, 2.0, False, "1.4 1.6 1.8 2 2.2 2.4 2.6"),
        (0.0028, 0.9, True, "0.001 0.01 0.1 1"),
        (1e-9, 1e9, True, "1e-10 1e-05 1 100000 1e+10"),
        (2.2, 2.4, True, "2 5 10"),
    ],
)
def test_the_numbers_at_an_axis_are_round(low: float, high: float, log: bool, marks: str) -> None:
    words, _ = drawn(chart_html([(0, low), (3, high)], "loss", log=log))
    assert words[2:] == [*marks.split(), "0", "1", "2", "3"]


def test_many_points_are_joined_and_few_points_give_a_message() -> None:
    _, line = drawn(chart_html([(n, float(n)) for n in range(100_000)], "loss", log=False))
    assert MAX_POINTS / 2 < len(line) <= MAX_POINTS
    assert chart_html([(0, 1.0)], "<loss>", log=False) == "<i>&lt;loss&gt;: nothing to draw yet</i>"
    drawn(chart_html([(0, 2.0), (1, 2.0)], "flat", log=False))
