"""Marks of ranks, in words."""

from __future__ import annotations

from tpunb.display.strip import MOST_ODD, html, in_words, marks
from tpunb.events import RankLife

RUNS = RankLife(begun=True, steps=10)


def test_each_rank_has_its_word() -> None:
    life = [
        RUNS, None, RankLife(), RankLife(begun=True, steps=7), RankLife(begun=True, steps=8),
        RankLife(begun=True, steps=10, compiling=True), RUNS, RUNS, RUNS,
    ]  # fmt: skip
    found = marks(9, life, {6: 0, 7: 1, 8: -15}, [7])
    assert [mark.word for mark in found] == [
        "running", "starting", "starting", "behind", "running", "compiling",
        "done", "failed", "stopped",
    ]  # fmt: skip
    assert in_words(found).startswith("ranks 0,4 running · ranks 1-2 starting · ")
    assert in_words(found).endswith(" · and 2 more")
    assert "rank 3 behind (step 7 of 10)" in in_words(found)


def test_before_anything_is_known_all_are_starting() -> None:
    assert in_words(marks(4, [], {}, [])) == "ranks 0-3 starting"


def test_quick_ranks_are_not_behind_because_they_were_looked_at_a_moment_apart() -> None:
    life = [RankLife(begun=True, steps=steps) for steps in (100, 95, 84)]
    assert [mark.word for mark in marks(3, life, {}, [], 10.0)] == ["running", "running", "behind"]
    assert [mark.word for mark in marks(3, life, {}, [])] == ["running", "behind", "behind"]


def test_a_card_stays_small_when_many_ranks_are_odd() -> None:
    life = [RankLife(begun=True, steps=100 * (rank % 2)) for rank in range(256)]
    found = marks(256, life, {}, [])
    assert html(found).count("behind (step 0 of 100)") == MOST_ODD + 1
    assert sum(html(found).count(glyph) for glyph in "●▲") == 256
    assert len(html(found)) < 5_000
    assert in_words(found) == (
        "ranks 0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,32,34,36,38,40,… behind (step 0 of 100)"
        " · ranks 1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31,33,35,37,39,41,… running"
    )


def test_after_a_hang_the_rank_that_the_others_waited_for_stands_out() -> None:
    waits, works = RankLife(begun=True, waiting=True), RankLife(begun=True)
    exits = dict.fromkeys(range(4), -15)
    found = marks(4, [waits, waits, waits, works], exits, [], hung=True)
    assert in_words(found) == "ranks 0-2 stopped · rank 3 awaited (the others waited for it)"
    assert "<b>▲ 3</b>" in html(found)
    # Where nobody waits for anybody, no rank is more to blame than the others.
    assert in_words(marks(4, [works] * 4, exits, [], hung=True)) == "ranks 0-3 stopped"
    assert in_words(marks(4, [waits, works] * 2, exits, [])) == "ranks 0-3 stopped"
