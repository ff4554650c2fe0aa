"""Buckets are few, contain everything, and are close to the best ones."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpunb.training import Buckets, choose_buckets
from tpunb.training.buckets import Size

LENGTHS = st.lists(st.integers(0, 900), min_size=1, max_size=200)
IMAGES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=60)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9), st.sampled_from([1, 8, 128]))
def test_lengths_fit_into_few_buckets(lengths: list[int], most: int, multiple: int) -> None:
    buckets = choose_buckets(lengths, most, multiple)
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
def test_images_fit_and_what_contains_a_batch_is_its_group(images: list[Size], most: int) -> None:
    buckets = choose_buckets(images, most, 32)
    assert 1 <= len(buckets.sizes) <= most
    groups = buckets.groups(images)
    for group in set(groups):
        batch = [image for image, own in zip(images, groups, strict=True) if own == group]
        largest = [max(side) for side in zip(*batch, strict=True)]
        # So a collator, which sees one rank's samples, takes the bucket of all ranks.
        assert buckets.fit(largest) == buckets.sizes[group]


@pytest.mark.parametrize("seed", range(5))
def test_little_more_is_padded_than_with_the_best_buckets(seed: int) -> None:
    random.seed(seed)
    lengths = [min(200, int(random.lognormvariate(3.5, 0.8)) + 1) for _ in range(500)]
    corners = sorted({-(-length // 10) * 10 for length in lengths})
    ends = [sorted([*chosen, corners[-1]]) for chosen in combinations(corners[:-1], 3)]
    best = min(
        sum(next(end for end in each if end >= length) for length in lengths) for each in ends
    )
    buckets = choose_buckets(lengths, 4, 10)
    assert sum(buckets.fit([length])[0] for length in lengths) <= 1.05 * best


def test_many_sizes_take_no_long_time() -> None:
    sizes = [(at % 997 + 1, at * 7 % 1009 + 1) for at in range(30_000)]
    assert len(choose_buckets(sizes, 6, 1).sizes) == 6


def test_they_say_what_they_cost() -> None:
    lengths = [10] * 90 + [100] * 10
    assert str(choose_buckets(lengths, 2, 1)) == (
        "2 buckets: 10, 100; 0% of all elements are padding (81% with the largest alone); "
        "at most 2 shapes of a batch"
    )
    assert (
        str(Buckets(((64, 32), (8, 8)))) == "2 buckets: 8 × 8, 64 × 32; at most 2 shapes of a batch"
    )


def test_what_fits_nowhere_is_told() -> None:
    buckets = Buckets(((128,), (64,)))
    assert buckets.sizes == ((64,), (128,))
    with pytest.raises(ValueError, match="no bucket contains 129: the largest is 128"):
        buckets.groups([3, 129])
    with pytest.raises(ValueError, match="the sizes of samples"):
        choose_buckets([])
    with pytest.raises(ValueError, match="same number of dimensions"):
        Buckets(((3,), (4, 5)))
