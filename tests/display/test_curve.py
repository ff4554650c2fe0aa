"""Curves: bounded, and true to what was logged."""

from __future__ import annotations

import base64
import math
import re

import pytest

from tpunb.display.curve import HEIGHT, POINTS, WIDTH, Curve


def curve(*values: float) -> Curve:
    made = Curve()
    for value in values:
        made.add(value)
    return made


def test_as_text() -> None:
    assert curve(0, 1, 2, 3, 4, 5, 6, 7).text() == "▁▂▃▄▅▆▇█"
    assert curve(3, 2, 1).text() == "█▅▁" or curve(3, 2, 1).text() == "█▄▁"
    assert curve(2, 2).text() == "▅▅" or curve(2, 2).text() == "▄▄"
    assert curve(0.9, sum([0.9] * 64) / 64).heights(10) == [0.5, 0.5]
    assert sum([0.9] * 64) / 64 != 0.9
    assert curve(1).text() == ""
    assert curve(1, math.nan, math.inf).text() == ""


def test_many_values_are_joined_and_keep_their_course() -> None:
    made = curve(*(float(n) for n in range(100_000)))
    assert POINTS <= len(made.values) < 2 * POINTS
    assert made.values == sorted(made.values)
    assert made.values[0] < 2_000
    assert made.values[-1] > 97_000
    assert len(made.heights(10)) <= 10


@pytest.mark.parametrize("values", [(1.0, 2.0), tuple(math.sin(n) for n in range(500))])
def test_the_picture_lies_within_its_size(values: tuple[float, ...]) -> None:
    address = curve(*values).image("#2f81f7")
    svg = base64.b64decode(address.partition("base64,")[2]).decode()
    found = re.search(r'points="([^"]+)"', svg)
    assert found
    for point in found[1].split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    assert len(address) < 1_100
