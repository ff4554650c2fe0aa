"""`shard`: every sample once, in equally many full batches; accepted, kept and refused options."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import tpunb
from tests.support import examples
from tpunb.training import shard, sharding
from tpunb.training.sharding import REMAINDERS, Partition, Remainder, partition, rank_slice

As = Callable[[int, int], None]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> As:
    """Make this process a rank for `shard`."""

    def be(rank: int, world: int) -> None:
        monkeypatch.setattr(sharding, "rank_and_world", lambda: (rank, world))

    return be


def of_all_ranks(make: Callable[[], Any], world: int, as_rank: As) -> list[list[Any]]:
    """Return each rank's batches of an epoch; check that their numbers are equal."""
    found = []
    for rank in range(world):
        as_rank(rank, world)
        found.append(list(make()))
    assert len({len(batches) for batches in found}) == 1
    return found


def real(found: list[list[Any]]) -> list[int]:
    """Return the samples that count, in order of steps and ranks."""
    return [
        int(row) for step in zip(*found, strict=True) for batch, mask in step for row in batch[mask]
    ]


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + self.size))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 8), st.sampled_from(REMAINDERS))
def test_a_stream_is_sharded_as_a_dataset_is(
    size: int, batch: int, world: int, remainder: Remainder
) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def as_rank(rank: int, world: int) -> None:
            patch.setattr(sharding, "rank_and_world", lambda: (rank, world))

        of_list = of_all_ranks(
            lambda: shard(range(size), batch, remainder=remainder), world, as_rank
        )
        of_stream = of_all_ranks(
            lambda: shard(Stream(size), batch, remainder=remainder), world, as_rank
        )
    for ours, theirs in zip(of_list, of_stream, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if remainder == "pad":
                assert torch.equal(one[1], other[1])
                assert torch.equal(one[0][one[1]], other[0][one[1]])
                assert one[0].shape == other[0].shape == (batch,)
            else:
                assert torch.equal(one, other)
                assert one.shape == (batch,)
    if remainder == "pad":
        assert real(of_list) == list(range(size))


def test_batches_are_what_collate_makes_of_them(as_rank: As) -> None:
    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor
        name: list[str]

    def collate(samples: list[int]) -> Pair:
        return Pair(torch.tensor(samples), [str(one) for one in samples])

    data: Any = range(10)
    found = of_all_ranks(lambda: shard(DataLoader(data, 4, collate_fn=collate)), 2, as_rank)
    (whole, mask), (last, last_mask) = found[1]
    assert whole.x.tolist() == [4, 5, 6, 7]
    assert mask.all()
    assert last.name == ["9", "8", "8", "8"]
    assert last_mask.tolist() == [True, False, False, False]


@pytest.mark.usefixtures("starts_processes")
def test_workers_keep_the_order(as_rank: As) -> None:
    data = TensorDataset(torch.arange(103))
    loader = DataLoader(data, 5, num_workers=2, persistent_workers=True)
    as_rank(1, 2)
    sharded = shard(loader)
    for _ in range(2):  # the second epoch has the same workers
        batches = [(batch, mask) for (batch,), mask in sharded]
        found = torch.cat([batch[mask] for batch, mask in batches])
        expected = [at for at in range(100) if at % 10 >= 5] + [101, 102]
        assert found.tolist() == expected
    del sharded, batches  # ends the workers


def test_a_shuffled_loader_has_one_order_on_all_ranks_and_another_each_epoch(as_rank: As) -> None:
    epochs = []
    for epoch in (0, 1, 0):

        def made(epoch: int = epoch) -> Any:
            torch.manual_seed(sharding.rank_and_world()[0])  # of no account
            batches = shard(DataLoader(range(50), 4, shuffle=True))  # type: ignore[arg-type]
            batches.set_epoch(epoch)
            return batches

        epochs.append(real(of_all_ranks(made, 3, as_rank)))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] == epochs[2] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    as_rank(0, 1)
    [(batch, _)] = shard(range(50), 50, shuffle=True, seed=7)
    assert sorted(batch.tolist()) == list(range(50))
    assert batch.tolist() != epochs[0]


@pytest.mark.parametrize(
    ("sampler", "count", "kinds"),
    [
        (lambda: SubsetRandomSampler(range(5, 16)), 11, set(range(5, 16))),
        (lambda: WeightedRandomSampler([0, 1, 0, 1], 21), 21, {1, 3}),
        (lambda: RandomSampler(range(4), replacement=True, num_samples=9), 9, None),
        (lambda: RandomSampler(range(20), num_samples=7, generator=torch.Generator()), 7, None),
        (lambda: [3, 1, 2], 3, {1, 2, 3}),
    ],
)
def test_other_samplers_are_drawn_alike_on_all_ranks(
    sampler: Callable[[], Any], count: int, kinds: set[int] | None, as_rank: As
) -> None:
    before = torch.initial_seed()
    loaders = iter([DataLoader(range(20), 2, sampler=sampler()) for _ in range(3)])  # type: ignore[arg-type]
    found = real(of_all_ranks(lambda: shard(next(loaders)), 3, as_rank))
    assert len(found) == count
    assert kinds is None or set(found) == kinds
    again = DataLoader(range(20), 2, sampler=sampler())  # type: ignore[arg-type]
    assert real(of_all_ranks(lambda: shard(again), 1, as_rank)) == found
    assert torch.initial_seed() == before


class Wandering:
    """A sampler that yields a different order each time."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([at + self.asked for at in range(6)])


def test_a_sampler_is_asked_once_in_an_epoch() -> None:
    sampler: Any = Wandering()
    batches = shard(DataLoader(range(20), 6, sampler=sampler))  # type: ignore[arg-type]
    for epoch in (1, 2):
        batches.set_epoch(epoch)
        assert len(batches) == 1
        assert [batch.tolist() for batch, _ in batches] == [list(range(epoch, epoch + 6))]
    assert sampler.asked == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_only_shuffles(shuffle: bool, as_rank: As) -> None:
    def made() -> Any:
        rank, world = sharding.rank_and_world()
        data: Any = range(21)
        sampler = DistributedSampler[int](
            data, num_replicas=world, rank=rank, shuffle=shuffle, seed=4
        )
        batches = shard(DataLoader(data, 2, sampler=sampler))
        batches.set_epoch(2)
        assert sampler.epoch == 2
        return batches

    found = real(of_all_ranks(made, 4, as_rank))
    assert sorted(found) == list(range(21))
    assert (found == list(range(21))) == (not shuffle)


def test_groups_are_of_the_samples_that_the_sampler_gives(as_rank: As) -> None:
    data = torch.arange(60)
    groups = (data % 3).tolist()
    found = of_all_ranks(lambda: shard(data, 4, shuffle=True, groups=groups), 2, as_rank)
    for step in zip(*found, strict=True):
        assert len({int(at) % 3 for batch, _ in step for at in batch}) == 1
    assert sorted(real(found)) == list(range(60))


def test_the_length_depends_on_the_current_world_size(as_rank: As) -> None:
    batches = shard(range(100), 8)
    assert len(batches) == 13
    assert (
        repr(batches)
        == "100 samples in 13 steps of 8 on 1 rank, remainder='pad': 4 of 104 rows are padding"
    )
    as_rank(3, 4)
    assert len(batches) == 4 == len(list(batches))
    batches = shard(range(100), 5, remainder="drop")
    assert repr(batches) == "100 samples in 5 steps of 5 on 4 ranks, remainder='drop'"


@pytest.mark.parametrize("data", [[], torch.empty(0, 3), Stream(0)])
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_shard_of_no_samples_is_an_empty_loop(data: Any, remainder: Remainder, as_rank: As) -> None:
    for world in (1, 3):
        as_rank(0, world)
        assert list(shard(data, 4, remainder=remainder)) == []
    if not isinstance(data, Stream):
        assert list(shard(data, 4, remainder=remainder, shuffle=True)) == []


def test_repeating_an_order_warns() -> None:
    batches = shard(range(8), 2, shuffle=True)
    next(iter(batches))  # a look at the first batch
    list(batches)
    for loop in (batches, tpunb.track(batches), tpunb.track(tpunb.track(batches))):
        with pytest.warns(UserWarning, match=r"repeats the order of epoch 0: call set_ep") as told:
            list(loop)
        assert told[0].filename == __file__
    batches.set_epoch(1)
    list(batches)
    evaluated = shard(range(8), 2)
    assert list(map(str, evaluated)) == list(map(str, evaluated))


@pytest.mark.usefixtures("starts_processes")
def test_a_stream_gets_set_epoch_and_may_have_one_worker(as_rank: As) -> None:
    as_rank(1, 2)
    batches = shard(DataLoader(Stream(6), 2, num_workers=1))
    batches.set_epoch(10)
    assert [(batch.tolist(), mask.tolist()) for batch, mask in batches] == [
        ([12, 13], [True, True]),
        ([15, 14], [True, False]),
    ]
    with pytest.raises(TypeError, match="has no len"):
        len(batches)  # type: ignore[arg-type]


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: shard(range(4)), TypeError, r"batch size .* shard\(dataset, 64\)"),
        (lambda: shard(range(4), 2, remainder="keep"), ValueError, "'pad', 'drop' or 'repeat'"),  # type: ignore[arg-type]
        (lambda: shard(DataLoader(range(4)), 2), ValueError, "its own batch_size"),  # type: ignore[arg-type]
        (lambda: shard(DataLoader(range(4)), shuffle=True), ValueError, "its own batch_size"),  # type: ignore[arg-type]
        (lambda: shard(DataLoader(range(4), batch_size=None)), ValueError, "makes no batches"),  # type: ignore[arg-type]
        (
            lambda: shard(DataLoader(range(4), batch_sampler=[[0, 1], [2]])),  # type: ignore[arg-type]
            ValueError,
            "a batch_sampler of its own",
        ),
        (lambda: shard(iter([1, 2]), 2), TypeError, r"not list_iterator.*MpDeviceLoader\(shard"),
        (lambda: shard(WithoutLength(), 2), TypeError, "with __len__"),
        (lambda: shard((torch.zeros(3), torch.zeros(3)), 2), TypeError, r"TensorDataset\(x, y\)"),
        (lambda: shard(range(4), 2, groups=[1, 2]), ValueError, r"shape \[2\].* 4 samples"),
        (lambda: shard(Stream(4), 2, groups=[1] * 4), ValueError, "a dataset with a length"),
        (lambda: shard(Stream(4), 2, shuffle=True), ValueError, "its own order"),
        (
            lambda: shard(DataLoader(Stream(4), 2, num_workers=2)),
            ValueError,
            "2 workers would each read the whole Stream",
        ),
    ],
)
def test_shard_refuses_unsupported_data(
    make: Callable[[], Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        make()


def test_a_subset_is_a_dataset(as_rank: As) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = of_all_ranks(lambda: shard(Subset(range(100), range(7, 20)), 3), 2, as_rank)  # type: ignore[arg-type]
    assert real(found) == list(range(7, 20))


SIZES = st.integers(0, 1000)
BATCHES = st.integers(1, 70)
WORLDS = st.integers(1, 8)


def counted_samples(parts: Partition) -> list[int]:
    """Return the samples that count, in order of steps and, within a step, of ranks."""
    samples: list[int] = []
    for step in range(len(parts.steps)):
        for rank in range(parts.world):
            mine = parts.of_rank(step, rank)
            assert mine.shape == (parts.batch_size,)
            first, end = rank_slice(parts.count(step), rank, parts.world)
            samples += mine[: end - first].tolist()
            # A filler is a sample of the same step.
            assert set(mine.tolist()) <= set(parts.of_step(step).tolist())
    return samples


@given(SIZES, BATCHES, WORLDS, st.sampled_from(REMAINDERS))
def test_partition_counts_every_sample_in_order_but_for_the_last_step(
    size: int, batch: int, world: int, remainder: Remainder
) -> None:
    whole = batch * world
    parts = partition(size, batch, world, remainder)
    steps = size // whole if remainder == "drop" else -(-size // whole)
    assert len(parts.steps) == steps
    counted = size if remainder == "pad" else steps * whole
    assert counted_samples(parts) == [at % size for at in range(counted)]


@given(SIZES, WORLDS)
def test_rank_slices_differ_by_one_at_most(count: int, world: int) -> None:
    slices = [rank_slice(count, rank, world) for rank in range(world)]
    assert [first for first, _ in slices] == [0, *(end for _, end in slices[:-1])]
    assert slices[-1][1] == count
    sizes = {end - first for first, end in slices}
    assert max(sizes) - min(sizes) <= 1


@given(
    st.lists(st.integers(-2, 4), max_size=300),
    st.integers(1, 20),
    WORLDS,
    st.sampled_from(REMAINDERS),
    st.booleans(),
)
def test_partition_steps_are_of_one_group(
    kinds: list[int], batch: int, world: int, remainder: Remainder, shuffled: bool
) -> None:
    groups = torch.tensor(kinds, dtype=torch.int64)
    shuffle = torch.Generator().manual_seed(3) if shuffled else None
    parts = partition(len(kinds), batch, world, remainder, groups=groups, shuffle=shuffle)
    whole = batch * world
    for step in range(len(parts.steps)):
        rows = torch.cat([parts.of_rank(step, rank) for rank in range(world)])
        assert len(groups[rows].unique()) == 1
    samples = counted_samples(parts)
    for kind in set(kinds):
        members = [at for at, other in enumerate(kinds) if other == kind]
        got = [at for at in samples if kinds[at] == kind]
        steps = len(members) // whole if remainder == "drop" else -(-len(members) // whole)
        if remainder == "pad":
            want = members
        else:
            want = [members[at % len(members)] for at in range(steps * whole)]
        assert sorted(got) == sorted(want)
        if not shuffled:
            assert got == want
    if not shuffled and remainder == "pad":
        assert list(dict.fromkeys(kinds[at] for at in samples)) == list(dict.fromkeys(kinds))


def test_partition_shuffles_steps_of_groups_by_the_generator_only() -> None:
    groups = torch.arange(400) % 4
    orders = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(len(orders))  # of no account
        orders.append(
            counted_samples(partition(400, 5, 2, "pad", groups=groups, shuffle=generator))
        )
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(400))
