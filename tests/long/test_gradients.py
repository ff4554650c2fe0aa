"""More of tests/training/test_gradients.py, which takes longer."""

from __future__ import annotations

import pytest

from tests.drivers.ranks import Ranks
from tests.training.test_gradients import accumulated, plain, same


@pytest.mark.parametrize("count", [1, 2])
def test_pieces_of_ranks_are_one_backward_pass(ranks: Ranks, count: int) -> None:
    expected = plain(0.1)
    for found in ranks.values(accumulated, count, 0.1, "xla"):
        same(found, expected)
