"""Collators: the sizes of buckets, the samples as they were, and a mask that says where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tpunb.training import (
    Buckets,
    choose_buckets,
    masked_mean,
    pad_images,
    pad_sequences,
    shard,
    sharding,
)

BUCKETS = Buckets(((4,), (8,), (16,)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 16), min_size=1, max_size=8), st.booleans())
def test_sequences_are_where_the_mask_is(lengths: list[int], featured: bool) -> None:
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
def test_images_are_at_the_top_left(sizes: list[tuple[int, int]]) -> None:
    buckets = choose_buckets(sizes, 3, 4)
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
def test_fields_are_padded_and_others_collated(make: Any, field: Any, get: Any) -> None:
    samples = [make(tokens, at) for at, tokens in enumerate(TOKENS)]
    batch, mask = pad_sequences(BUCKETS, {field: -9})(samples)
    assert type(batch) is (tuple if type(samples[0]) is list else type(samples[0]))
    tokens, labels = get(batch)
    assert tokens.tolist() == PADDED
    assert tokens.dtype == torch.int64
    assert labels.tolist() == [0, 1]
    assert mask.sum(1).tolist() == [3, 6]


def test_several_fields_of_a_sample_have_their_own_filling() -> None:
    samples = [{"ids": tokens, "labels": tokens * 2} for tokens in TOKENS]
    batch, _ = pad_sequences(BUCKETS, {"ids": 0, "labels": -100})(samples)
    assert batch["ids"][0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert batch["labels"][0].tolist() == [0, 2, 4, -100, -100, -100, -100, -100]
    samples[1]["labels"] = samples[1]["labels"][:2]
    with pytest.raises(ValueError, match="'labels' has other sizes than 'ids'"):
        pad_sequences(BUCKETS, {"ids": 0, "labels": -100})(samples)


def test_a_tall_and_a_wide_image_are_of_two_batches() -> None:
    images = [torch.zeros(3, 4, 16), torch.zeros(3, 16, 4)]
    buckets = choose_buckets([tuple(image.shape[1:]) for image in images], 2, 1)
    with pytest.raises(ValueError, match=r"16 × 16: .* to one bucket: shard\(…, groups="):
        pad_images(buckets)(images)


def test_what_is_too_long_is_told_or_cut() -> None:
    samples = [torch.arange(17), torch.arange(2)]
    with pytest.raises(ValueError, match="no bucket contains 17"):
        pad_sequences(BUCKETS)(samples)
    batch, mask = pad_sequences(BUCKETS, cut=True)(samples)
    assert batch[0].tolist() == list(range(16))
    assert mask.sum(1).tolist() == [16, 2]


def test_a_field_must_be_named_where_there_are_several() -> None:
    with pytest.raises(TypeError, match=r"a dict is no tensor: .*fill=\{'input_ids': 0"):
        pad_sequences(BUCKETS)([{"input_ids": torch.zeros(3)}])


def test_with_groups_all_ranks_have_one_shape_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 400, (301,), generator=generator).tolist()
    buckets = choose_buckets(lengths, 4)
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
