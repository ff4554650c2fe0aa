"""More of tests/xla/rehearsal/test_divergence.py, which takes longer."""

from __future__ import annotations

import pytest

from tests.drivers.ranks import Ranks
from tests.xla.rehearsal.test_divergence import trained


@pytest.mark.parametrize(
    "kinds",
    [
        ["ordinal", "load", "read after backward", "pending", "save", "gather"],
        ["read before backward", "evaluate", "slice", "fine-tune"],
    ],
    ids=" ".join,
)
def test_no_divergence_for_work_a_rank_may_do_alone(ranks: Ranks, kinds: list[str]) -> None:
    assert ranks.values(trained, 3, *kinds) == [[], [], []]
