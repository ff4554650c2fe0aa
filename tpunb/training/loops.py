"""Loops that would ask the device whether to go on, with a fixed number of trips instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from tpunb.training.trees import leaves, map_tensors

State = TypeVar("State")


class Looped(NamedTuple):
    """What `masked_while` gives."""

    state: Any
    trips: torch.Tensor
    """int32, for each row: in how many trips it took part."""
    going: torch.Tensor
    """bool, for each row: whether it would have gone on."""


def masked_while(
    going: Callable[[State], torch.Tensor],
    body: Callable[[State], State],
    state: State,
    *,
    most: int,
) -> Looped:
    """`while going(state): state = body(state)` for each row, in `most` trips for all.

    `state` is a tensor, or a dict, tuple or dataclass of tensors, with a row for each sample.
    `going(state)` gives a bool tensor with an element for each row. A row for which it was
    false keeps its state for good, whatever `body` makes of it. So nothing asks the device
    whether to go on: one program, compiled once, no wait. Its length grows with `most`. (On a
    CPU, XLA of torch_xla 2.8 takes about twice as long to compile it for each further trip of a
    body without matrix products; measured: 5.6 s for 10 trips, 2.9 takes 0.6 s for 12.)

    What is still going after `most` trips is told in the result, not cut silently.
    """
    active = going(state)
    trips = torch.zeros_like(active, dtype=torch.int32)
    for _ in range(most):
        state = _where(active, body(state), state)
        trips = trips + active.to(torch.int32)
        active = active & going(state)
    return Looped(state, trips, active)


def _where(active: torch.Tensor, new: State, old: State) -> State:
    olds = iter([leaf for leaf in leaves(old) if isinstance(leaf, torch.Tensor)])

    def choose(value: torch.Tensor) -> torch.Tensor:
        before = next(olds)
        if value.shape != before.shape or value.dtype != before.dtype:
            raise ValueError(
                f"masked_while: the body made {value.dtype} {list(value.shape)} of "
                f"{before.dtype} {list(before.shape)}: shapes and types must stay"
            )
        rows = active.reshape(active.shape + (1,) * (value.dim() - active.dim()))
        return torch.where(rows, value, before)

    chosen: State = map_tensors(choose, new)
    return chosen
