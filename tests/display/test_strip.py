"""Marks of ranks, in words."""

from __future__ import annotations

from tpunb.display.strip import in_words, marks
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
