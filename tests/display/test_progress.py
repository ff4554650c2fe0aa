"""Shares, speeds and what is left."""

from __future__ import annotations

import pytest

from tpunb.display.progress import Remaining, Speed, folded, fraction, in_words
from tpunb.events import Bar


@pytest.mark.parametrize(
    ("bars", "share", "words"),
    [
        ([], None, ""),
        ([Bar("", 5)], None, "step 5"),
        ([Bar("", 1_200, 2_400)], 0.5, "step 1,200 of 2,400"),
        ([Bar("epoch", 2, 10), Bar("", 5, 20)], 0.225, "epoch 3 of 10 · step 5 of 20"),
        ([Bar("epoch", 10, 10)], 1.0, "epoch 10 of 10"),
        ([Bar("epoch", 2, 10), Bar("batch", 5)], 0.2, "epoch 3 of 10 · batch 5"),
        ([Bar("Epoch 1", 61, 200)], 0.305, "Epoch 1: 61 of 200"),
        ([Bar("", 0, 0)], None, "step 0 of 0"),
    ],
)
def test_how_far(bars: list[Bar], share: float | None, words: str) -> None:
    assert fraction(bars) == (None if share is None else pytest.approx(share))
    assert in_words(bars) == words


def test_of_several_ranks_the_last_counts() -> None:
    assert folded({0: [Bar("", 5, 9)], 1: [Bar("", 4, 9)], 2: [Bar("", 6, 9)]}) == [Bar("", 4, 9)]
    assert folded({}) == ()


def test_a_speed_is_that_of_the_last_seconds() -> None:
    speed = Speed()
    assert speed.per_second() is None
    for second in range(100):
        speed.add(float(second), second * 2 if second < 50 else 100 + (second - 50) * 8)
    assert speed.per_second() == pytest.approx(8)
    speed.add(100.0, 3)  # another attempt
    assert speed.per_second() is None
    speed.add(102.0, 13)
    assert speed.per_second() == pytest.approx(5)


def test_what_is_left_follows_from_what_is_done() -> None:
    left = Remaining()
    assert left.seconds(0.0, None) is None
    assert left.seconds(100.0, 0.2) is None  # it was resumed there
    assert left.seconds(110.0, 0.4) == pytest.approx(30)
    assert left.seconds(120.0, 0.1) is None  # it began anew
