"""`masked_while` against a plain loop for each row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpunb.training import masked_while


def going(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return state["n"] != 1


def collatz(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    n = state["n"]
    n = torch.where(n % 2 == 0, n // 2, 3 * n + 1)
    return {"n": n, "path": state["path"] + torch.stack([n, -n], 1)}


def begun(numbers: list[int]) -> dict[str, torch.Tensor]:
    return {
        "n": torch.tensor(numbers),
        "path": torch.zeros(len(numbers), 2, dtype=torch.int64),
    }


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 130))
def test_each_row_goes_its_own_number_of_trips(numbers: list[int], most: int) -> None:
    found = masked_while(going, collatz, begun(numbers), most=most)
    for row, number in enumerate(numbers):
        state, trips = begun([number]), 0
        while going(state) and trips < most:
            state = collatz(state)
            trips += 1
        assert found.state["n"][row] == state["n"][0]
        assert torch.equal(found.state["path"][row], state["path"][0])
        assert found.trips[row] == trips
        assert found.going[row] == going(state)[0]


def test_gradients_are_those_of_the_trips_that_a_row_took_part_in() -> None:
    x = torch.tensor([1.0, 3.0, 9.0], requires_grad=True)
    found = masked_while(lambda y: y < 8, lambda y: y * 2, x, most=5)
    found.state.sum().backward()
    assert found.trips.tolist() == [3, 2, 0]
    assert x.grad is not None
    assert x.grad.tolist() == [8.0, 4.0, 1.0]


def test_a_state_must_keep_its_shapes() -> None:
    with pytest.raises(ValueError, match=r"made torch\.float32 \[1\] of torch\.float32 \[2\]"):
        masked_while(lambda y: y < 8, lambda y: y[:1], torch.zeros(2), most=2)
