"""`Buckets`, the few sizes to which samples are padded, and collators that pad to them.

loader = DataLoader(data, 8, collate_fn=pad_sequences(Buckets.choose(lengths)))
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

Size = tuple[int, ...]
"""The dimensions that are padded: (length,) of a sequence, (height, width) of an image."""

DISTINCT = 400
"""The most distinct sizes that are merged one by one; if there are more, sizes are rounded up."""


@dataclass(frozen=True)
class Buckets:
    """The sizes to which batches are padded: XLA compiles one program for each at most.

    `Buckets.choose` chooses them from the data; by hand: `Buckets(((128,), (512,)))`.

    Raises ValueError without a size, or if sizes have different numbers of dimensions.
    """

    sizes: tuple[Size, ...]
    """The sizes, (length,) or (height, width), in order of their number of elements."""
    padding: float | None = None
    """The share of padding, from 0 to 1, in the data that they were chosen from."""
    padding_of_one: float | None = None
    """The share of padding if all of that data were padded to the largest size."""

    def __post_init__(self) -> None:
        if not self.sizes or len({len(size) for size in self.sizes}) != 1:
            raise ValueError(f"Buckets: sizes of the same number of dimensions, not {self.sizes}")
        # A size that contains a batch contains its samples. So with one order of all sizes, the
        # first size that fits a batch of one group is the first that fits its samples.
        order = sorted(set(self.sizes), key=lambda size: (int(np.prod(size)), size))
        object.__setattr__(self, "sizes", tuple(order))

    @classmethod
    def choose(
        cls, sizes: Iterable[int | Sequence[int]], most: int = 8, multiple: int = 8
    ) -> Buckets:
        """Choose at most `most` buckets that need little padding for samples of these sizes.

        `sizes`: a length for each sample, or a tuple such as (height, width). Bucket sizes are
        multiples of `multiple`: a TPU computes in tiles of 8 and 128. `print(buckets)` shows the
        share of padding, and the largest number of shapes that XLA will compile for.

        It starts with a bucket for each size, and merges the two buckets that add the least
        padding until `most` are left. Raises ValueError if `sizes` is empty or `most` is below 1.
        """
        asked = np.array([_size(size) for size in sizes], dtype=np.int64)
        if asked.size == 0 or most < 1:
            raise ValueError("Buckets.choose needs the sizes of the samples, and most >= 1")
        step = multiple
        while True:
            rounded = np.maximum(-(-asked // step), 1) * step
            corners, counts = np.unique(rounded, axis=0, return_counts=True)
            if len(corners) <= max(DISTINCT, most):
                break
            step *= 2
        chosen = cls(tuple(_size(corner) for corner in _merge(corners, counts, most).tolist()))
        ends = np.array(chosen.sizes)
        used = asked.prod(axis=1).sum()
        bucket_of = (asked[:, None, :] <= ends).all(axis=2).argmax(axis=1)
        return cls(
            chosen.sizes,
            float(1 - used / ends.prod(axis=1)[bucket_of].sum()),
            float(1 - used / (ends.max(axis=0).prod() * len(asked))),
        )

    def fit(self, size: Sequence[int]) -> Size:
        """Return the smallest bucket that contains a size. Raises ValueError if none does."""
        return self.sizes[self._index(tuple(size))]

    def groups(self, sizes: Iterable[int | Sequence[int]]) -> list[int]:
        """Return the index of each sample's bucket, for `shard(…, groups=…)`.

        Raises ValueError for a size that no bucket contains.
        """
        index_of = functools.cache(self._index)
        return [index_of(_size(size)) for size in sizes]

    def _index(self, size: Size) -> int:
        for index, bucket in enumerate(self.sizes):
            if all(own >= asked for own, asked in zip(bucket, size, strict=True)):
                return index
        raise ValueError(
            f"no bucket contains {_text(size)}: the largest is {_text(self.sizes[-1])}. Choose "
            "buckets from all the data, or cut such samples; if images of one batch are of several "
            "buckets: shard(…, groups=buckets.groups(sizes))"
        )

    def __str__(self) -> str:
        text = f"{len(self.sizes)} buckets: {', '.join(map(_text, self.sizes))}"
        if self.padding is not None and self.padding_of_one is not None:
            text += (
                f"; {self.padding:.0%} of all elements are padding ({self.padding_of_one:.0%} "
                "with the largest alone)"
            )
        return f"{text}; at most {len(self.sizes)} batch shapes"


def _merge(
    corners: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.int64]:
    """Merge boxes until `most` are left. Each has a corner and the number of its samples."""

    def added_padding(index: int) -> npt.NDArray[np.int64]:
        """Return how many elements of padding merging this box with each other box adds."""
        merged = np.maximum(corners, corners[index]).prod(axis=1) * (counts + counts[index])
        apart = corners.prod(axis=1) * counts
        costs: npt.NDArray[np.int64] = merged - apart - apart[index]
        costs[index] = np.iinfo(np.int64).max
        return costs

    costs = np.array([added_padding(index) for index in range(len(corners))])
    while len(corners) > most:
        first, second = sorted(divmod(int(costs.argmin()), len(corners)))
        corners[first] = np.maximum(corners[first], corners[second])
        counts[first] += counts[second]
        corners, counts = np.delete(corners, second, 0), np.delete(counts, second)
        costs = np.delete(np.delete(costs, second, 0), second, 1)
        costs[first] = costs[:, first] = added_padding(first)
    return corners


def _size(size: int | Sequence[int]) -> Size:
    return (int(size),) if isinstance(size, (int, np.integer)) else tuple(map(int, size))


def _text(size: Size) -> str:
    return " × ".join(map(str, size))


Fill = float | Mapping[Any, float]
"""The padding value: one number for samples that are one tensor, or one for each padded field."""
_WHOLE_SAMPLE = ""
"""The field name for a sample that is one tensor."""


def pad_sequences(
    buckets: Buckets, fill: Fill = 0, *, cut: bool = False
) -> Callable[[Sequence[Any]], tuple[Any, torch.Tensor]]:
    """Return a collate_fn for sequences whose first dimension is their length.

        collate = pad_sequences(buckets, fill={"input_ids": 0, "labels": -100})
        for batch, mask in DataLoader(data, 8, collate_fn=collate):

    It returns `(batch, mask)`: the samples padded to the smallest bucket that contains them all,
    of shape (rows, length, …), and a bool tensor (rows, length) that is False for padding.

    `fill`: the padding value. For samples that are dicts, tuples or dataclasses, a dict of the
    fields to pad (by key, index or name) with the value of each. The padded fields of a sample
    must have the same length. Other fields are collated by `default_collate`. `cut`: truncate
    samples that are longer than the largest bucket.

    With several ranks, all ranks need the same bucket in each step: use `shard(…, groups=…)`.

    The collate_fn raises ValueError for samples longer than the largest bucket (without `cut`)
    and for fields of different lengths; TypeError if `fill` does not name the fields to pad.
    """
    return _Pad(buckets, fill, slice(0, 1), cut)


def pad_images(
    buckets: Buckets, fill: Fill = 0
) -> Callable[[Sequence[Any]], tuple[Any, torch.Tensor]]:
    """Return a collate_fn for images whose last two dimensions are height and width.

    It returns `(batch, mask)`: the images of shape (rows, …, height, width), each at the top left,
    and a bool tensor (rows, height, width) that is False for padding. `fill` and errors: as for
    `pad_sequences`.
    """
    return _Pad(buckets, fill, slice(-2, None), False)


@dataclasses.dataclass(frozen=True)
class _Pad:
    buckets: Buckets
    fill: Fill
    padded: slice
    """The dimensions of a field that are padded."""
    cut: bool

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, torch.Tensor]:
        fills = self.fill if isinstance(self.fill, Mapping) else {_WHOLE_SAMPLE: self.fill}
        columns = {name: [_get(sample, name) for sample in samples] for name in fills}
        name, column = next(iter(columns.items()))
        sizes = [self._size(value) for value in column]
        size = self.buckets.fit([max(lengths) for lengths in zip(*sizes, strict=True)])
        mask = self._joined([torch.ones(each, dtype=torch.bool) for each in sizes], size, False)
        padded = {}
        for name, column in columns.items():
            if [self._size(value) for value in column] != sizes:
                raise ValueError(
                    f"the fields {name!r} and {next(iter(columns))!r} differ in size within a "
                    "sample: pad them with a collator each"
                )
            padded[name] = self._joined(column, size, fills[name])
        return _collated(samples, padded), mask

    def _size(self, value: torch.Tensor) -> Size:
        size = tuple(value.shape[self.padded])
        largest = self.buckets.sizes[-1]
        return tuple(map(min, size, largest)) if self.cut else size

    def _joined(self, column: list[torch.Tensor], size: Size, fill: float) -> torch.Tensor:
        first = column[0]
        shape = list(first.shape)
        # A mask has only the padded dimensions.
        where = self.padded if len(shape) > len(size) else slice(None)
        shape[where] = size
        joined = torch.full((len(column), *shape), fill, dtype=first.dtype)
        for row, value in zip(joined, column, strict=True):
            kept = [slice(0, end) for end in shape]
            cut = value[tuple(kept)]
            row[tuple(slice(0, end) for end in cut.shape)] = cut
        return joined


def _get(sample: Any, name: Any) -> torch.Tensor:
    if name == _WHOLE_SAMPLE:
        value = sample
    elif isinstance(sample, (Mapping, tuple, list)):
        value = sample[name]
    else:
        value = getattr(sample, name)
    if isinstance(value, (Mapping, tuple)) or dataclasses.is_dataclass(value):
        raise TypeError(
            f"a {type(value).__name__} is not a tensor: name the fields to pad, "
            "for example fill={'input_ids': 0, 'labels': -100}"
        )
    return torch.as_tensor(value)


def _collated(samples: Sequence[Any], padded: dict[Any, torch.Tensor]) -> Any:
    """Return the batch: padded fields in their places, other fields from default_collate."""
    first = samples[0]
    if _WHOLE_SAMPLE in padded:
        return padded[_WHOLE_SAMPLE]
    if isinstance(first, Mapping):
        return {
            name: padded[name] if name in padded else default_collate([s[name] for s in samples])
            for name in first
        }
    if isinstance(first, (tuple, list)):
        fields = [
            padded[at] if at in padded else default_collate([sample[at] for sample in samples])
            for at in range(len(first))
        ]
        return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)
    batch = copy.copy(first)
    for field in dataclasses.fields(first):
        column = [getattr(sample, field.name) for sample in samples]
        value = padded[field.name] if field.name in padded else default_collate(column)
        object.__setattr__(batch, field.name, value)
    return batch
