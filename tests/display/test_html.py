"""Rank badges and sparklines: their contents, and their limited size."""

from __future__ import annotations

import base64
import math
import re

import pytest

from tpunb.display.html import (
    HEIGHT,
    MAX_ODD,
    POINTS,
    WIDTH,
    Sparkline,
    badges_html,
    describe_badges,
    rank_badges,
)
from tpunb.runs.events import RankSnapshot

RUNS = RankSnapshot(begun=True, steps=10)


def test_each_rank_has_a_badge() -> None:
    late, later = RankSnapshot(begun=True, steps=8), RankSnapshot(begun=True, steps=7)
    compiles = RankSnapshot(begun=True, steps=10, compiling=True)
    life = [RUNS, None, RankSnapshot(), later, late, compiles, RUNS, RUNS, RUNS]
    badges = rank_badges(9, life, {6: 0, 7: 1, 8: -15}, [7])
    words = "running starting starting behind running compiling done failed stopped"
    assert [badge.word for badge in badges] == words.split()
    assert describe_badges(badges).startswith("ranks 0,4 running · ranks 1-2 starting · ")
    assert describe_badges(badges).endswith(" · and 2 more")
    assert "rank 3 behind (3 steps)" in describe_badges(badges)


def test_badges_of_fast_ranks_sampled_apart_are_not_behind() -> None:
    life = [RankSnapshot(begun=True, steps=steps) for steps in (100, 95, 84)]
    words = [badge.word for badge in rank_badges(3, life, {}, [], 10.0)]
    assert words == ["running", "running", "behind"]
    assert [badge.word for badge in rank_badges(3, life, {}, [])] == ["running", "behind", "behind"]


def test_a_card_stays_small_when_many_ranks_are_odd() -> None:
    life = [RankSnapshot(begun=True, steps=100 * (rank % 2)) for rank in range(256)]
    badges = rank_badges(256, life, {}, [])
    assert badges_html(badges).count("behind (100 steps)") == MAX_ODD + 1
    assert sum(badges_html(badges).count(glyph) for glyph in "●▲") == 256
    assert len(badges_html(badges)) < 5_000
    assert describe_badges(badges) == (
        "ranks 0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,32,34,36,38,40,… behind (100 steps)"
        " · ranks 1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31,33,35,37,39,41,… running"
    )


def test_badges_after_a_hang_highlight_the_missing_rank() -> None:
    waits, works = RankSnapshot(begun=True, waiting=True), RankSnapshot(begun=True)
    exits = dict.fromkeys(range(4), -15)
    badges = rank_badges(4, [waits, waits, waits, works], exits, [], hung=True)
    assert describe_badges(badges) == "ranks 0-2 stopped · rank 3 blocking the others"
    assert "<b>▲ 3</b>" in badges_html(badges)
    # If no rank waits for another, none is marked as blocking the others.
    assert describe_badges(rank_badges(4, [works] * 4, exits, [], hung=True)) == "ranks 0-3 stopped"
    assert describe_badges(rank_badges(4, [waits, works] * 2, exits, [])) == "ranks 0-3 stopped"


def sparkline(*values: float) -> Sparkline:
    line = Sparkline()
    for value in values:
        line.add(value)
    return line


def test_sparkline_of_equal_values_is_flat() -> None:
    assert sparkline(0.9, sum([0.9] * 64) / 64).heights() == [0.5, 0.5]
    assert sum([0.9] * 64) / 64 != 0.9
    assert not sparkline(1, math.nan, math.inf).varies


def test_sparkline_of_many_values_keeps_its_shape() -> None:
    line = sparkline(*(float(n) for n in range(100_000)))
    assert POINTS <= len(line.values) < 2 * POINTS
    assert line.values == sorted(line.values)
    assert line.values[0] < 2_000
    assert line.values[-1] > 97_000
    assert len(line.heights()) <= POINTS


@pytest.mark.parametrize("values", [(1.0, 2.0), tuple(math.sin(n) for n in range(500))])
def test_sparkline_image_stays_within_its_size(values: tuple[float, ...]) -> None:
    url = sparkline(*values).image("#2f81f7")
    svg = base64.b64decode(url.partition("base64,")[2]).decode()
    points = re.search(r'points="([^"]+)"', svg)
    assert points
    for point in points[1].split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    assert len(url) < 1_100
