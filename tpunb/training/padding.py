"""Collators that pad samples to buckets: `DataLoader(…, collate_fn=pad_sequences(buckets))`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from tpunb.training.buckets import Buckets, Size

Fill = float | Mapping[Any, float]
"""A number for samples that are one tensor; else a number for each field that is padded."""
_PLAIN = ""
"""The name of the only field of a sample that is one tensor."""


def pad_sequences(
    buckets: Buckets, fill: Fill = 0, *, cut: bool = False
) -> Callable[[Sequence[Any]], tuple[Any, torch.Tensor]]:
    """A collate_fn for sequences, whose first dimension is their length.

    Gives `(batch, mask)`: the samples at the length of the smallest bucket that contains them
    all, and a bool tensor (rows, length), True where a sample is and not its padding.

    `fill`: what is put there. For samples that are dicts, tuples or dataclasses it names the
    fields that are padded, by key, index or name, each with its number:
    `{"input_ids": 0, "labels": -100}`. They are of one length in a sample. Other fields are
    collated as by default. `cut`: cut what is longer than the largest bucket; it raises
    ValueError otherwise.

    With several ranks, all need the same bucket in a step: `shard(…, groups=…)` sees to it.
    """
    return _Pad(buckets, fill, slice(0, 1), cut)


def pad_images(
    buckets: Buckets, fill: Fill = 0
) -> Callable[[Sequence[Any]], tuple[Any, torch.Tensor]]:
    """The same for images, whose last two dimensions are height and width.

    Gives `(batch, mask)`, with a mask (rows, height, width). Images are at the top left.
    """
    return _Pad(buckets, fill, slice(-2, None), False)


@dataclasses.dataclass(frozen=True)
class _Pad:
    buckets: Buckets
    fill: Fill
    padded: slice
    """Which dimensions of a field are."""
    cut: bool

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, torch.Tensor]:
        fills = self.fill if isinstance(self.fill, Mapping) else {_PLAIN: self.fill}
        columns = {name: [_get(sample, name) for sample in samples] for name in fills}
        name, column = next(iter(columns.items()))
        sizes = [self._size(value) for value in column]
        size = self.buckets.fit([max(lengths) for lengths in zip(*sizes, strict=True)])
        mask = self._joined([torch.ones(one, dtype=torch.bool) for one in sizes], size, False)
        padded = {}
        for name, column in columns.items():
            if [self._size(value) for value in column] != sizes:
                raise ValueError(
                    f"the field {name!r} has other sizes than {next(iter(columns))!r} in the same "
                    "samples: pad them by collators of their own"
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
        # A mask has no other dimensions than those that are padded.
        where = self.padded if len(shape) > len(size) else slice(None)
        shape[where] = size
        joined = torch.full((len(column), *shape), fill, dtype=first.dtype)
        for row, value in zip(joined, column, strict=True):
            kept = [slice(0, end) for end in shape]
            cut = value[tuple(kept)]
            row[tuple(slice(0, end) for end in cut.shape)] = cut
        return joined


def _get(sample: Any, name: Any) -> torch.Tensor:
    if name == _PLAIN:
        value = sample
    elif isinstance(sample, (Mapping, tuple, list)):
        value = sample[name]
    else:
        value = getattr(sample, name)
    if isinstance(value, (Mapping, tuple)) or dataclasses.is_dataclass(value):
        raise TypeError(
            f"a {type(value).__name__} is no tensor: name the fields that are padded, "
            "fill={'input_ids': 0, 'labels': -100}"
        )
    return torch.as_tensor(value)


def _collated(samples: Sequence[Any], padded: dict[Any, torch.Tensor]) -> Any:
    """The other fields as by default, with those that are padded in their places."""
    first = samples[0]
    if _PLAIN in padded:
        return padded[_PLAIN]
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
