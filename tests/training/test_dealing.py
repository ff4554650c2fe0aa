"""Every sample once, in order, in equally many full batches: for any size, ranks and batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpunb.training.dealing import RESTS, Deal, Rest, deal, share

SIZES = st.integers(0, 1000)
BATCHES = st.integers(1, 70)
WORLDS = st.integers(1, 8)


def counted(dealt: Deal) -> list[int]:
    """What counts, step after step and in each rank after rank."""
    found: list[int] = []
    for step in range(len(dealt.steps)):
        for rank in range(dealt.world):
            mine = dealt.of_rank(step, rank)
            assert mine.shape == (dealt.batch_size,)
            first, end = share(dealt.count(step), rank, dealt.world)
            found += mine[: end - first].tolist()
            # A filler is a sample of the same step.
            assert set(mine.tolist()) <= set(dealt.of_step(step).tolist())
    return found


@given(SIZES, BATCHES, WORLDS)
def test_padded_every_sample_counts_once_and_in_order(size: int, batch: int, world: int) -> None:
    dealt = deal(size, batch, world, "pad")
    assert counted(dealt) == list(range(size))
    assert len(dealt.steps) == -(-size // (batch * world))


@given(SIZES, BATCHES, WORLDS)
def test_dropped_only_the_last_part_of_a_step_is_left_out(
    size: int, batch: int, world: int
) -> None:
    whole = batch * world
    dealt = deal(size, batch, world, "drop")
    assert counted(dealt) == list(range(size // whole * whole))
    assert all(dealt.count(step) == whole for step in range(len(dealt.steps)))


@given(SIZES, BATCHES, WORLDS)
def test_repeated_the_first_samples_fill_the_last_step(size: int, batch: int, world: int) -> None:
    whole = batch * world
    dealt = deal(size, batch, world, "repeat")
    steps = -(-size // whole)
    assert counted(dealt) == [at % size for at in range(steps * whole)]


@given(SIZES, WORLDS)
def test_parts_of_ranks_differ_by_one_at_most(count: int, world: int) -> None:
    parts = [share(count, rank, world) for rank in range(world)]
    assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == count
    sizes = {end - first for first, end in parts}
    assert max(sizes) - min(sizes) <= 1


@given(
    st.lists(st.integers(-2, 4), max_size=300),
    st.integers(1, 20),
    WORLDS,
    st.sampled_from(RESTS),
    st.booleans(),
)
def test_a_step_is_of_one_group(
    kinds: list[int], batch: int, world: int, rest: Rest, shuffled: bool
) -> None:
    groups = torch.tensor(kinds, dtype=torch.int64)
    shuffle = torch.Generator().manual_seed(3) if shuffled else None
    dealt = deal(len(kinds), batch, world, rest, groups=groups, shuffle=shuffle)
    whole = batch * world
    for step in range(len(dealt.steps)):
        rows = torch.cat([dealt.of_rank(step, rank) for rank in range(world)])
        assert len(groups[rows].unique()) == 1
    found = counted(dealt)
    for kind in set(kinds):
        members = [at for at, other in enumerate(kinds) if other == kind]
        got = [at for at in found if kinds[at] == kind]
        steps = len(members) // whole if rest == "drop" else -(-len(members) // whole)
        if rest == "pad":
            want = members
        else:
            want = [members[at % len(members)] for at in range(steps * whole)]
        assert sorted(got) == sorted(want)
        if not shuffled:
            assert got == want
    if not shuffled and rest == "pad":
        assert list(dict.fromkeys(kinds[at] for at in found)) == list(dict.fromkeys(kinds))


def test_steps_of_groups_are_shuffled_by_the_generator_alone() -> None:
    groups = torch.arange(400) % 4
    orders = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(len(orders))  # of no account
        orders.append(counted(deal(400, 5, 2, "pad", groups=groups, shuffle=generator)))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(400))


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("groups", [None, torch.empty(0, dtype=torch.int64)])
def test_nothing_is_no_step(rest: Rest, groups: torch.Tensor | None) -> None:
    assert deal(0, 8, 4, rest, groups=groups).steps == []
