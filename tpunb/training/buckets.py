"""A few sizes to which samples are padded, chosen from the data: one compilation for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Size = tuple[int, ...]
"""What is padded of a sample: (length,) of a sequence, (height, width) of an image."""

DISTINCT = 400
"""Sizes that are looked at one by one; with more of them, they are rounded up further."""


@dataclass(frozen=True)
class Buckets:
    """Sizes in which all batches are, each with the same number of rows: at most so many shapes.

    Made by `choose_buckets`, or by hand: `Buckets(((128,), (512,)))`.
    """

    sizes: tuple[Size, ...]
    """Ascending by their number of elements."""
    padding: float | None = None
    """The share of padding in what they were chosen from, 0 to 1, and …"""
    padding_of_one: float | None = None
    """… the share with the largest size only."""

    def __post_init__(self) -> None:
        if not self.sizes or len({len(size) for size in self.sizes}) != 1:
            raise ValueError(f"Buckets: sizes of the same number of dimensions, not {self.sizes}")
        # Whatever contains a batch contains its samples, so with one order of all sizes the
        # first that fits a batch of one group is the one that fits its samples.
        order = sorted(set(self.sizes), key=lambda size: (int(np.prod(size)), size))
        object.__setattr__(self, "sizes", tuple(order))

    def fit(self, size: Sequence[int]) -> Size:
        """The smallest bucket that contains a size. Raises ValueError if none does."""
        return self.sizes[self._index(tuple(size))]

    def groups(self, sizes: Iterable[int | Sequence[int]]) -> list[int]:
        """The number of the bucket of each sample, for `shard(…, groups=…)`."""
        known: dict[Size, int] = {}
        found = []
        for size in map(_size, sizes):
            if size not in known:
                known[size] = self._index(size)
            found.append(known[size])
        return found

    def _index(self, size: Size) -> int:
        for index, bucket in enumerate(self.sizes):
            if all(own >= asked for own, asked in zip(bucket, size, strict=True)):
                return index
        raise ValueError(
            f"no bucket contains {_text(size)}: the largest is {_text(self.sizes[-1])}. Choose "
            "buckets from all data that will come, or cut such samples; keep the images of a "
            "batch to one bucket: shard(…, groups=buckets.groups(sizes))"
        )

    def __str__(self) -> str:
        text = f"{len(self.sizes)} buckets: {', '.join(map(_text, self.sizes))}"
        if self.padding is not None and self.padding_of_one is not None:
            text += (
                f"; {self.padding:.0%} of all elements are padding ({self.padding_of_one:.0%} "
                "with the largest alone)"
            )
        return f"{text}; at most {len(self.sizes)} shapes of a batch"


def choose_buckets(
    sizes: Iterable[int | Sequence[int]], most: int = 8, multiple: int = 8
) -> Buckets:
    """At most `most` buckets with little padding for samples of these sizes.

    `sizes`: a length for each sample, or a tuple such as (height, width). Each size of a bucket
    is a multiple of `multiple`: a TPU computes in tiles of 8 and 128. Printed, they say how
    much padding they mean, and how many shapes XLA will see at the most.

    Begins with a bucket for each size, and makes one of the two that cost least until `most`
    are left. Raises ValueError without any size.
    """
    asked = np.array([_size(size) for size in sizes], dtype=np.int64)
    if asked.size == 0 or most < 1:
        raise ValueError("choose_buckets: it takes the sizes of samples, and one bucket at least")
    step = multiple
    while True:
        rounded = np.maximum(-(-asked // step), 1) * step
        corners, counts = np.unique(rounded, axis=0, return_counts=True)
        if len(corners) <= max(DISTINCT, most):
            break
        step *= 2
    corners = _merged(corners, counts, most)
    made = Buckets(tuple(_size(corner) for corner in corners.tolist()))
    ends = np.array(made.sizes)
    used = asked.prod(axis=1).sum()
    inside = (asked[:, None, :] <= ends).all(axis=2).argmax(axis=1)
    return Buckets(
        made.sizes,
        float(1 - used / ends.prod(axis=1)[inside].sum()),
        float(1 - used / (ends.max(axis=0).prod() * len(asked))),
    )


def _merged(
    corners: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.int64]:
    """Corners of `most` boxes that contain all of those given, with their counts inside."""

    def price(index: int) -> npt.NDArray[np.int64]:
        """What each box costs more if this one is made one with it."""
        together = np.maximum(corners, corners[index]).prod(axis=1) * (counts + counts[index])
        apart = corners.prod(axis=1) * counts
        prices: npt.NDArray[np.int64] = together - apart - apart[index]
        prices[index] = np.iinfo(np.int64).max
        return prices

    prices = np.array([price(index) for index in range(len(corners))])
    while len(corners) > most:
        one, other = sorted(divmod(int(prices.argmin()), len(corners)))
        corners[one] = np.maximum(corners[one], corners[other])
        counts[one] += counts[other]
        corners, counts = np.delete(corners, other, 0), np.delete(counts, other)
        prices = np.delete(np.delete(prices, other, 0), other, 1)
        prices[one] = prices[:, one] = price(one)
    return corners


def _size(size: int | Sequence[int]) -> Size:
    return (int(size),) if isinstance(size, (int, np.integer)) else tuple(map(int, size))


def _text(size: Size) -> str:
    return " × ".join(map(str, size))
