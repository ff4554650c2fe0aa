"""More of tests/training/test_precision.py, which takes longer."""

from __future__ import annotations

from tests.drivers.ranks import Ranks
from tests.training.test_precision import (
    check,
    told_in_a_rank,
    trained,
    trained_beside_the_device,
    trained_in_a_rank,
)


def test_bf16_training_on_the_cpu_matches_float64() -> None:
    check(trained("cpu", short=True))


def test_bf16_training_in_ranks_matches_float64(ranks: Ranks) -> None:
    for found in ranks.values(trained_in_a_rank, 2):
        check(found)
    (found,) = ranks.values(trained_beside_the_device, 1)
    check(found)


def test_ranks_warn_too(ranks: Ranks) -> None:
    assert [len(told) for told in ranks.values(told_in_a_rank, 2, 1e-6)] == [1, 1]
    assert ranks.values(told_in_a_rank, 1, 3e-3) == [[]]
