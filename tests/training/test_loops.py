"""`masked_while` against a plain loop for each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.ranks import Ranks, warm
from tpunb.training import masked_while


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with warm(tmp_path_factory.mktemp("ranks")) as made:
        yield made


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


def on_the_device() -> Any:
    import torch_xla
    import torch_xla.debug.metrics as met

    from tpunb.training import compilations

    device, found = torch_xla.device(), []
    for numbers in ([3, 1, 6], [27, 2, 1], [1, 1, 1]):
        state = {name: value.to(device) for name, value in begun(numbers).items()}
        before = compilations()
        looped = masked_while(going, collatz, state, most=12)
        torch_xla.sync()
        reads = met.counter_value("xla::_local_scalar_dense")
        found.append((compilations() - before, reads, looped.trips.cpu(), looped.going.cpu()))
    return found


@pytest.mark.slow
def test_it_is_one_program_whatever_the_data(ranks: Ranks) -> None:
    [found] = ranks.values(on_the_device, 1)
    assert [compiled for compiled, *_ in found] == [1, 0, 0]
    assert {reads for _, reads, *_ in found} == {None}
    assert [trips.tolist() for *_, trips, _ in found] == [[7, 0, 8], [12, 1, 0], [0, 0, 0]]
    assert found[1][3].tolist() == [True, False, False]
