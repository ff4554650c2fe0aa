"""The chart of a panel: a picture with axes."""

from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree

from tpunb.display.chart import MOST, image


def drawn(html: str) -> tuple[list[str], list[tuple[float, float]]]:
    """The words and the points of the picture."""
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert found
    svg = ElementTree.fromstring(base64.b64decode(found[1]).decode())
    words = [element.text or "" for element in svg if element.tag.endswith("text")]
    [line] = [element for element in svg if element.tag.endswith("polyline")]
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    return words, points  # type: ignore[return-value]


def test_axes_and_line() -> None:
    words, points = drawn(image([(0, 1.0), (50, 3.0), (100, 5.0)], "loss", log=False))
    assert [words[0], words[-2]] == ["1", "5"]
    assert [words[1], words[-1]] == ["0", "100"]
    (left, low), (middle, half), (right, high) = points
    assert math.isclose(middle, (left + right) / 2, abs_tol=0.1)
    assert math.isclose(half, (low + high) / 2, abs_tol=0.1)
    assert low > high  # downwards, as pictures count


def test_on_a_log_scale_powers_are_equally_far() -> None:
    points = [(0, -1.0), (1, 0.01), (2, 0.1), (3, 1.0), (4, math.nan), (5, math.inf)]
    words, line = drawn(image(points, "loss", log=True))
    assert [words[0], words[-2]] == ["0.01", "1"]
    assert len(line) == 3
    assert math.isclose(line[1][1], (line[0][1] + line[2][1]) / 2, abs_tol=0.1)


def test_many_points_are_joined_and_few_are_said() -> None:
    _, line = drawn(image([(n, float(n)) for n in range(100_000)], "loss", log=False))
    assert MOST / 2 < len(line) <= MOST
    assert image([(0, 1.0)], "<loss>", log=False) == "<i>&lt;loss&gt;: nothing to draw yet</i>"
    drawn(image([(0, 2.0), (1, 2.0)], "flat", log=False))
