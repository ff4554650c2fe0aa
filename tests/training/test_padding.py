"""Buckets are few, contain everything and pad little; collators pad to them, with a mask."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tpunb.training import (
    Buckets,
    masked_mean,
    pad_images,
    pad_sequences,
    shard,
    sharding,
)
from tpunb.training.padding import Size

LENGTHS = st.lists(st.integers(0, 900), min_size=1, max_size=200)
IMAGES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=60)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9), st.sampled_from([1, 8, 128]))
def test_buckets_fit_all_lengths(lengths: list[int], most: int, multiple: int) -> None:
    buckets = Buckets.choose(lengths, most, multiple)
    assert 1 <= len(buckets.sizes) <= most
    groups = buckets.groups(lengths)
    for length, group in zip(lengths, groups, strict=True):
        (end,) = buckets.sizes[group]
        assert end % multiple == 0
        assert end >= length
        assert all(length > smaller for (smaller,) in buckets.sizes[:group])
        assert buckets.fit([length]) == (end,)
    assert buckets.padding is not None
    padded = sum(buckets.sizes[group][0] for group in groups)
    assert buckets.padding == pytest.approx(1 - sum(lengths) / padded)


@settings(deadline=None)
@given(IMAGES, st.integers(1, 5))
def test_buckets_of_images_match_their_groups(images: list[Size], most: int) -> None:
    buckets = Buckets.choose(images, most, 32)
    assert 1 <= len(buckets.sizes) <= most
    groups = buckets.groups(images)
    for group in set(groups):
        batch = [image for image, own in zip(images, groups, strict=True) if own == group]
        largest = [max(side) for side in zip(*batch, strict=True)]
        # So a collator, which sees one rank's samples, takes the bucket of all ranks.
        assert buckets.fit(largest) == buckets.sizes[group]


@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_close_to_the_least_padding(seed: int) -> None:
    random.seed(seed)
    lengths = [min(200, int(random.lognormvariate(3.5, 0.8)) + 1) for _ in range(500)]
    corners = sorted({-(-length // 10) * 10 for length in lengths})
    ends = [sorted([*chosen, corners[-1]]) for chosen in combinations(corners[:-1], 3)]
    best = min(
        sum(next(end for end in each if end >= length) for length in lengths) for each in ends
    )
    buckets = Buckets.choose(lengths, 4, 10)
    assert sum(buckets.fit([length])[0] for length in lengths) <= 1.05 * best


def test_buckets_of_many_sizes_are_chosen_quickly() -> None:
    sizes = [(at % 997 + 1, at * 7 % 1009 + 1) for at in range(30_000)]
    assert len(Buckets.choose(sizes, 6, 1).sizes) == 6


def test_buckets_print_their_padding() -> None:
    lengths = [10] * 90 + [100] * 10
    assert str(Buckets.choose(lengths, 2, 1)) == (
        "2 buckets: 10, 100; 0% of all elements are padding (81% with the largest alone); "
        "at most 2 batch shapes"
    )
    assert str(Buckets(((64, 32), (8, 8)))) == "2 buckets: 8 × 8, 64 × 32; at most 2 batch shapes"


def test_bucket_missing_for_a_size_raises() -> None:
    buckets = Buckets(((128,), (64,)))
    assert buckets.sizes == ((64,), (128,))
    with pytest.raises(ValueError, match="no bucket contains 129: the largest is 128"):
        buckets.groups([3, 129])
    with pytest.raises(ValueError, match="the sizes of the samples"):
        Buckets.choose([])
    with pytest.raises(ValueError, match="same number of dimensions"):
        Buckets(((3,), (4, 5)))


BUCKETS = Buckets(((4,), (8,), (16,)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 16), min_size=1, max_size=8), st.booleans())
def test_padded_sequences_match_their_mask(lengths: list[int], featured: bool) -> None:
    samples = [torch.rand(length, 3) if featured else torch.rand(length) for length in lengths]
    batch, mask = pad_sequences(BUCKETS, -1.0)(samples)
    assert (batch.shape[1],) == BUCKETS.fit([max(lengths)])
    assert mask.sum(1).tolist() == lengths
    assert (batch[~mask] == -1.0).all()
    assert torch.equal(batch[mask], torch.cat(samples))
    if sum(lengths):
        torch.testing.assert_close(masked_mean(batch, mask), torch.cat(samples).mean())


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6))
def test_padded_images_are_at_the_top_left(sizes: list[tuple[int, int]]) -> None:
    buckets = Buckets.choose(sizes, 3, 4)
    groups = buckets.groups(sizes)
    sizes = [size for size, group in zip(sizes, groups, strict=True) if group == groups[0]]
    images = [torch.rand(3, height, width) for height, width in sizes]
    batch, mask = pad_images(buckets)(images)
    assert batch.shape[2:] == mask.shape[1:]
    assert tuple(batch.shape[2:]) == buckets.sizes[groups[0]]
    for row, where, image in zip(batch, mask, images, strict=True):
        _, height, width = image.shape
        assert torch.equal(row[:, :height, :width], image)
        assert where[:height, :width].all()
        assert where.sum() == height * width
        assert row.sum() == pytest.approx(image.sum().item(), rel=1e-5)


class Named(NamedTuple):
    tokens: torch.Tensor
    label: int


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    label: int


TOKENS = [torch.arange(length) for length in (3, 6)]
PADDED = [[0, 1, 2, -9, -9, -9, -9, -9], [0, 1, 2, 3, 4, 5, -9, -9]]


@pytest.mark.parametrize(
    ("make", "field", "get"),
    [
        (lambda t, at: {"tokens": t, "label": at}, "tokens", lambda b: (b["tokens"], b["label"])),
        (lambda t, at: {"tokens": t.tolist(), "label": at}, "tokens", lambda b: b.values()),
        (lambda t, at: (t, at), 0, lambda b: b),
        (lambda t, at: [t, at], 0, lambda b: b),
        (Named, 0, lambda b: (b.tokens, b.label)),
        (Sample, "tokens", lambda b: (b.tokens, b.label)),
    ],
)
def test_padding_of_one_field_collates_the_others(make: Any, field: Any, get: Any) -> None:
    samples = [make(tokens, at) for at, tokens in enumerate(TOKENS)]
    batch, mask = pad_sequences(BUCKETS, {field: -9})(samples)
    assert type(batch) is (tuple if type(samples[0]) is list else type(samples[0]))
    tokens, labels = get(batch)
    assert tokens.tolist() == PADDED
    assert tokens.dtype == torch.int64
    assert labels.tolist() == [0, 1]
    assert mask.sum(1).tolist() == [3, 6]


def test_padding_fills_each_field_with_its_own_value() -> None:
    samples = [{"ids": tokens, "labels": tokens * 2} for tokens in TOKENS]
    batch, _ = pad_sequences(BUCKETS, {"ids": 0, "labels": -100})(samples)
    assert batch["ids"][0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert batch["labels"][0].tolist() == [0, 2, 4, -100, -100, -100, -100, -100]
    samples[1]["labels"] = samples[1]["labels"][:2]
    with pytest.raises(ValueError, match="'labels' and 'ids' differ in size"):
        pad_sequences(BUCKETS, {"ids": 0, "labels": -100})(samples)


def test_padding_of_tall_and_wide_images_in_one_batch_raises() -> None:
    images = [torch.zeros(3, 4, 16), torch.zeros(3, 16, 4)]
    buckets = Buckets.choose([tuple(image.shape[1:]) for image in images], 2, 1)
    with pytest.raises(ValueError, match=r"16 × 16: .* several buckets: shard\(…, groups="):
        pad_images(buckets)(images)


def test_too_long_sequences_raise_or_are_cut() -> None:
    samples = [torch.arange(17), torch.arange(2)]
    with pytest.raises(ValueError, match="no bucket contains 17"):
        pad_sequences(BUCKETS)(samples)
    batch, mask = pad_sequences(BUCKETS, cut=True)(samples)
    assert batch[0].tolist() == list(range(16))
    assert mask.sum(1).tolist() == [16, 2]


def test_padding_of_a_dict_needs_a_field_name() -> None:
    with pytest.raises(TypeError, match=r"a dict is not a tensor: .*fill=\{'input_ids': 0"):
        pad_sequences(BUCKETS)([{"input_ids": torch.zeros(3)}])


def test_sharded_groups_give_all_ranks_one_shape_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 400, (301,), generator=generator).tolist()
    buckets = Buckets.choose(lengths, 4)
    data: Any = [torch.full((length,), float(at)) for at, length in enumerate(lengths)]
    loader = DataLoader(data, 5, shuffle=True, collate_fn=pad_sequences(buckets))
    found = []
    for rank in range(3):
        monkeypatch.setattr(sharding, "rank_and_world", lambda rank=rank: (rank, 3))
        found.append(list(shard(loader, groups=buckets.groups(lengths))))
    seen: list[int] = []
    shapes = set()
    for step in zip(*found, strict=True):
        assert len({batch.shape for (batch, _), _ in step}) == 1
        for (batch, mask), real in step:
            shapes.add(batch.shape)
            seen += [int(row[0]) for row in batch[real]]
            assert mask.sum(1)[real].tolist() == [lengths[int(row[0])] for row in batch[real]]
    assert sorted(seen) == list(range(301))
    assert len(shapes) == len(buckets.sizes) == 4
