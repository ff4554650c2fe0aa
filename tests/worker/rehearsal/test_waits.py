"""Ranks that wait for each other in groups of their own are told so; those that are late, not."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.worker.ranks import Ranks, rehearse, warm
from tpunb.worker.rehearsal.waits import Wait, crossed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with warm(tmp_path_factory.mktemp("ranks")) as started:
        yield started


def wait(*members: int, number: int = 1, **others: int) -> Wait:
    """A rank's wait in exchange `number` of its group; `g01=2`: it began two in that of 0 and 1."""
    name = "-".join(map(str, members))
    before = {"-".join(group[1:]): count for group, count in others.items()}
    return Wait(name, members, {**before, name: number}, "")


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ({0: wait(0, 1), 1: wait(0, 1)}, []),
        ({0: wait(0, 1)}, []),
        ({0: wait(0, 1), 1: wait(1, 2)}, []),
        ({0: wait(0, 1, 2), 2: wait(0, 2)}, [0, 2]),
        # The 1st of rank 0's group has taken place for both: rank 1 needs nobody who waits.
        ({0: wait(0, 1, number=2), 1: wait(1, 2, g01=2)}, []),
        ({0: wait(0, 1), 1: wait(1, 2), 2: wait(0, 2)}, [0, 1, 2]),
        # Rank 0 is not in the circle, and waits for it.
        ({0: wait(0, 1), 1: wait(1, 2), 2: wait(1, 2, 3), 3: wait(3, 4)}, [0, 1, 2, 3]),
        ({0: wait(0, 1), 1: wait(1, 2), 2: wait(2, 3), 3: wait(3, 4)}, []),
    ],
)
def test_only_a_circle_is_one(waits: dict[int, Wait], found: list[int]) -> None:
    assert sorted(crossed(0, waits[0], waits.get)) == found
    for rank, said in waits.items():
        assert Wait.from_json(said.to_json()).lacks(waits[0]) == said.lacks(waits[0]), rank


def permuted(pairs: list[list[list[int]]]) -> str:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.worker.rehearsal.errors import CollectiveError

    x = torch.full((3,), float(rank), device=torch_xla.device())
    try:
        xm.collective_permute(x, pairs[rank])
        xm.rendezvous("behind it")
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "pairs", "called"),
    [
        (
            "CrossedError",
            [[[0, 1], [1, 2]], [[0, 1], [1, 2]], [[0, 2]]],
            [(0, "[0, 1], [1, 2]"), (2, "[0, 2]")],
        ),
        (
            "CrossedError",
            [[[0, 1]], [[1, 2]], [[2, 0]]],
            [(0, "[0, 1]"), (1, "[1, 2]"), (2, "[2, 0]")],
        ),
        # Rank 2 has no part in its own, and is here for the next collective of all.
        ("MismatchError", [[[0, 1], [1, 2]], [[0, 1], [1, 2]], [[0, 1]]], [(0, "[0, 1], [1, 2]")]),
    ],
)
def test_other_pairs_on_other_ranks_are_named(
    ranks: Ranks, kind: str, pairs: list[list[list[int]]], called: list[tuple[int, str]]
) -> None:
    began = time.monotonic()
    said = [text for text in ranks.values(permuted, 3, pairs) if text.startswith(kind)]
    assert said
    assert time.monotonic() - began < 60.0, "this was a time-out"
    for rank, described in called:
        text = rf"ranks? (\d, )*{rank}(, \d)*: collective_permute of float32\[3\], pairs "
        assert re.search(
            rf"{text}\[{re.escape(described)}\]\n +line \d+ of test_waits.py: xm.coll", said[0]
        ), said[0]


def passed_on() -> float:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.full((3,), 1.0 + rank, device=torch_xla.device())
    for pair in ([0, 1], [1, 2]) if rank < 2 else ([1, 2],):
        time.sleep(0.9 * rank)  # the others wait for longer than they do without telling
        if rank in pair:
            x = x + xm.collective_permute(x, [pair])
    value: float = xm.all_reduce("sum", x).mean().item()
    return value


def test_ranks_that_wait_for_a_late_one_go_on(ranks: Ranks) -> None:
    # 1 is sent to 2, their sum to 3.
    assert ranks.values(passed_on, 3) == [1.0 + 3.0 + 6.0] * 3
