"""More of tests/display/test_log_view.py, which takes longer."""

from __future__ import annotations

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.display.test_log_view import Shown


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), floods=st.integers(0, 3))
def test_every_line_is_shown_once_or_counted(seed: int, floods: int) -> None:
    chance = random.Random(seed)
    shown = Shown()
    written = dict.fromkeys(range(4), 0)
    for _ in range(chance.randrange(60)):
        for rank in range(4):
            most = 20_000 if rank < floods else 5
            count = chance.randrange(most)
            if chance.random() < 0.3:
                lines = [f"{rank} {written[rank] + n} é{'x' * 30}\n" for n in range(count)]
                shown.feed(rank, "".join(lines), chance.choice(["stdout", "stderr"]))
                written[rank] += count
        shown.wait(chance.choice([0.05, 0.1, 0.3]))
    shown.finish()

    shown.check_pace(messages=11)  # the end is written at once
    total_seen = 0
    for rank in range(4):
        pattern = re.compile(rf"^\[{rank}\] {rank} (\d+) é", re.M)
        seen = [int(number) for number in pattern.findall(shown.text)]
        assert seen == sorted(set(seen))
        assert not written[rank] or seen[-1] == written[rank] - 1
        total_seen += len(seen)
    assert total_seen + shown.left_out == sum(written.values())
