"""The device's random numbers: its own stream, seeded with the CPU's."""

from __future__ import annotations

import copy
import pickle

import pytest


def test_streams_are_apart() -> None:
    import torch
    from torch.nn import functional

    torch.manual_seed(3)
    first, cpu = torch.rand(4, device="tpu"), torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), cpu)
    assert torch.equal(torch.rand(4, device="tpu"), first)
    torch.manual_seed(3)
    functional.dropout(first, 0.5)
    torch.bernoulli(first)
    torch.poisson(first)
    assert torch.equal(torch.rand(4), cpu)


def test_state_can_be_kept() -> None:
    import torch

    with torch.random.fork_rng(devices=[0], device_type="tpu"):
        inside = torch.rand(2, device="tpu")
    assert torch.equal(torch.rand(2, device="tpu"), inside)
    generator = torch.tpu.default_generators[0]
    state = generator.get_state()
    expected = torch.rand(2, device="tpu")
    torch.tpu.set_rng_state(state)
    assert torch.equal(torch.rand(2, device="tpu"), expected)
    assert (state.dtype, state.numel()) == (torch.uint8, 16)  # as DTensor reads it
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        torch.tpu.set_rng_state(torch.get_rng_state())


def test_generators() -> None:
    import torch

    mine = torch.Generator(device="tpu").manual_seed(3)
    assert isinstance(mine, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert mine.device == torch.device("tpu", 0)
    copies = copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), mine.clone_state()
    expected = torch.randn(2, device="tpu", generator=mine)
    for copied in copies:
        assert torch.equal(torch.randn(2, device="tpu", generator=copied), expected)
    with pytest.raises(RuntimeError, match="Expected a generator of the TPU"):
        torch.randn(2, device="tpu", generator=torch.Generator())
